"""A model on two hosts, which are two servers of this machine with directories and keys of their own."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tercet.protocol.transport.keys import write_keys
from tests.e2e.long_answer import long_answer
from tests.e2e.random_checkpoint import PLAIN, write
from tests.e2e.test_tensor_parallel import lives
from tests.server_process import Server
from tests.two_hosts import Host, command_of, free_port, ranks_of, scheduler_of

TOKENS = 150
OPTIONS = ("--kv-cache-bytes", "16MiB", "--dtype", "float32", "--threads", "1")
STOP_LIMIT = 30.0


class Hosts:
    """Both hosts, which find each other by an address and keys."""

    def __init__(self, start: Callable[..., Server], place: Path, *split: str) -> None:
        self.models = [write(place / "one" / "tiny-qwen", PLAIN), place / "two" / "tiny-qwen"]
        shutil.copytree(self.models[0], self.models[1])
        write_keys(place / "keys")
        self.links = ["--dist-init-addr", f"127.0.0.1:{free_port()}", "--keys", str(place / "keys" / "scheduler")]
        self.far = self.start_far()
        self.near = start(str(self.models[0]), *OPTIONS, *split, "--nnodes", "2", *self.links)

    def stop(self) -> None:
        """Stop both hosts."""
        assert self.near.stop() == 0, "\n".join(self.near.lines)
        self.far.process.send_signal(signal.SIGTERM)
        assert self.far.process.wait(STOP_LIMIT) == 0, "\n".join(self.far.lines)

    def start_far(self) -> Host:
        return Host.start(command_of(self.models[1], "--node-rank", "1", "--threads", "1", *self.links))

    def restart_far(self) -> None:
        """Kill the other host's supervisor, its scheduler process and its rank; a new one then joins by itself."""
        processes = [scheduler_of(self.far.process), *ranks_of(self.far.process)]
        self.far.process.kill()
        self.far.process.wait()
        for each in processes:
            each.kill()
        self.far = self.start_far()


@pytest.fixture(scope="module")
def hosts(start: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(start, tmp_path_factory.mktemp("hosts"), "--tp", "2")
    try:
        hosts.near.wait()
        hosts.far.wait()
        yield hosts
        hosts.stop()
    finally:
        hosts.far.process.kill()
        hosts.far.process.wait()


@pytest.fixture(scope="module")
def whole(hosts: Hosts) -> str:
    """Return the answer without faults."""
    return long_answer(hosts.near.client(), hosts.near.model(), TOKENS)


@pytest.mark.slow
def test_two_hosts_say_what_one_process_says(start: Callable[..., Server], hosts: Hosts, whole: str) -> None:
    alone = start(str(hosts.models[0]), *OPTIONS).wait()
    assert long_answer(alone.client(), alone.model(), TOKENS) == whole
    assert alone.stop() == 0


@pytest.mark.slow
def test_a_host_with_other_weights_is_refused_in_one_line(hosts: Hosts, tmp_path: Path) -> None:
    """The model of the second host is exchanged while its process is dead."""
    kept = hosts.models[1]
    hosts.models[1] = write(tmp_path / "other" / "tiny-qwen", PLAIN, tie_word_embeddings=True)
    hosts.restart_far()
    assert hosts.far.process.wait(60) == 2, "\n".join(hosts.far.lines)
    words = f"{hosts.models[1]} differs from the model of host 0: give all hosts the same files"
    assert hosts.far.lines[-1] == f"tercet: error: scheduler-0: host 0 refuses this host: {words}"
    assert any("host 1 is refused: " + words in line for line in hosts.near.lines), "\n".join(hosts.near.lines)
    hosts.models[1] = kept
    hosts.far = hosts.start_far().wait()


def kill_far_rank(hosts: Hosts) -> None:
    ranks_of(hosts.far.process)[0].kill()


def stop_far_rank(hosts: Hosts) -> None:
    ranks_of(hosts.far.process)[0].suspend()


def kill_far_scheduler(hosts: Hosts) -> None:
    scheduler_of(hosts.far.process).kill()


def kill_near_scheduler(hosts: Hosts) -> None:
    scheduler_of(hosts.near.process).kill()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (kill_far_rank, "rank 1 of this model ended there: killed by SIGKILL"),
        pytest.param(stop_far_rank, "rank 1 of this model ended there: it hangs", marks=pytest.mark.slow),
        pytest.param(kill_far_scheduler, "host 1 of this model is lost", marks=pytest.mark.slow),
        pytest.param(Hosts.restart_far, "host 1 of this model is lost", marks=pytest.mark.slow),
        pytest.param(kill_near_scheduler, "died: killed by SIGKILL", marks=pytest.mark.slow),
    ],
)
def test_a_request_outlives_what_happens_on_a_host(
    hosts: Hosts, whole: str, fault: Callable[[Hosts], None], words: str
) -> None:
    before = [scheduler_of(hosts.near.process), *ranks_of(hosts.far.process)]
    assert len(before) == 2
    client, model = hosts.near.client().with_options(timeout=120), hosts.near.model()
    assert long_answer(client, model, TOKENS, 20, lambda: fault(hosts)) == whole
    assert not any(map(lives, before))
    assert any(words in line for line in hosts.near.lines), "\n".join(hosts.near.lines)
    after: list[psutil.Process] = ranks_of(hosts.far.process)
    assert len(after) == 1
    assert lives(after[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("split", [["--pp", "2"], ["--tp", "2", "--pp", "2"]], ids=["stages", "stages of two"])
def test_stages_on_two_hosts_say_the_same(
    start: Callable[..., Server], whole: str, tmp_path: Path, split: list[str]
) -> None:
    hosts = Hosts(start, tmp_path, *split)
    try:
        client, model = hosts.near.wait().client().with_options(timeout=120), hosts.near.model()
        assert long_answer(client, model, TOKENS) == whole
        assert long_answer(client, model, TOKENS, 20, lambda: kill_far_rank(hosts)) == whole
        hosts.stop()
    finally:
        hosts.far.process.kill()
        hosts.far.process.wait()
