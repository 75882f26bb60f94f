"""A scheduler process among real peers: it answers while it loads, serves, drains, and always says that it lives."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tercet.protocol.messages.messages import (
    BatchTokenIDOutput,
    ContinueGenerationReq,
    ControlReply,
    FlushCacheReq,
    Heartbeat,
    PauseGenerationReq,
    Rejected,
    TokenizerFiles,
    TokenizerFilesReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import Phase, Role, unpack_ints
from tercet.protocol.node import PeerDown, PeerReady, PeerUp, ThreadNode
from tercet.protocol.probe import probe
from tercet.protocol.testing import Listener, Network
from tercet.scheduler import resolved_model as found_model
from tercet.scheduler.__about__ import __version__
from tercet.scheduler.config import ModelOptions, ProcessOptions, ScheduleOptions
from tercet.scheduler.diagnostics.event_log import read_events, replay
from tercet.scheduler.executor_factory import EXECUTORS, build_fake
from tercet.scheduler.model_files import tokenizer_files
from tercet.scheduler.ports import Executor
from tercet.scheduler.resolved_model import identity_of, resolve_served_model
from tercet.scheduler.testing import FakeExecutor, request, small_capacity
from tercet.scheduler.wiring import SchedulerProcess

PATIENCE = 60.0
PROMPT = [7, 3, 9, 4, 1]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(heartbeat_interval=0.25, silence=10.0) as network:
        yield network


@pytest.fixture
def start(network: Network) -> Iterator[Start]:
    """Starts `tercet-scheduler` with a model and more options; what still runs in the end is killed."""
    processes: list[subprocess.Popen[str]] = []

    def run(model: Path | str, *options: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "tercet.scheduler", "--peer", "scheduler-0"]
        command += ["--listen", f"ipc://{network.directory}", "--model", str(model), *options]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@contextmanager
def running(network: Network, path: Path) -> Iterator[tuple[SchedulerProcess, Listener]]:
    """A process in a thread, with the executor named fake, and a frontend that it has met. It is made to leave."""
    process = SchedulerProcess(
        ProcessOptions(peer="scheduler-0", listen=f"ipc://{network.directory}"),
        ModelOptions(model=str(path), executor="fake"),
        ScheduleOptions(),
    )
    thread = threading.Thread(target=process.run)
    thread.start()
    try:
        frontend = Listener(network.node(Role.FRONTEND))
        frontend.wait_for(PeerUp, timeout=PATIENCE)
        yield process, frontend
    finally:
        process.stop()
        thread.join(PATIENCE)
    assert not thread.is_alive()


def tokens_at(detokenizer: Listener, count: int) -> dict[tuple[str, int], list[int]]:
    """The rows that reach a detokenizer until so many choices have ended."""
    output: dict[tuple[str, int], list[int]] = {}
    while count:
        batch = detokenizer.wait_for(BatchTokenIDOutput, timeout=PATIENCE).message
        assert isinstance(batch, BatchTokenIDOutput)
        offsets, ids = unpack_ints(batch.offsets), unpack_ints(batch.token_ids)
        for row, (rid, index) in enumerate(zip(batch.rids, unpack_ints(batch.indices), strict=True)):
            output.setdefault((rid, index), []).extend(ids[offsets[row] : offsets[row + 1]])
        count -= len(batch.finishes)
    return output


def expected(count: int, choice: int = 0) -> list[int]:
    """What the fake executor says with the vocabulary of a tiny checkpoint."""
    model = FakeExecutor(small_capacity(vocab_size=389))
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(model.next_token(tokens, choice))
    return tokens[len(PROMPT) :]


def test_tokenizer_files_are_given_while_the_model_still_loads(
    network: Network, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = threading.Event()

    def load(*arguments: Any) -> Executor:
        assert loaded.wait(PATIENCE)
        assert arguments[4] == process._board.advance
        return build_fake(*arguments)

    monkeypatch.setitem(EXECUTORS, "fake", load)
    path = checkpoints("llama")
    with running(network, path) as (process, frontend):
        assert frontend.node.send("scheduler-0", TokenizerFilesReq(id="t"))
        answer = frontend.wait_for(TokenizerFiles, timeout=PATIENCE)
        assert isinstance(answer.message, TokenizerFiles)
        assert dict(zip(answer.message.names, map(bytes, answer.frames), strict=True)) == tokenizer_files(path)
        assert not any(isinstance(delivery.message, PeerReady) for delivery in frontend.heard)
        beat = frontend.wait_for(Heartbeat, timeout=PATIENCE).message
        assert isinstance(beat, Heartbeat)
        assert beat.phase == Phase.LOADING
        loaded.set()
        ready = frontend.wait_for(PeerReady, timeout=PATIENCE).message
        assert isinstance(ready, PeerReady)
        assert ready.ready.software == f"tercet-scheduler {__version__}"
        assert ready.ready.limits is not None
        assert (ready.ready.limits.context_length, ready.ready.limits.vocab_size) == (512, 389)
        assert ready.ready.limits.grammars == ""


def wait_for_beat(listener: Listener, awaited: Callable[[Heartbeat], bool]) -> None:
    """Until the scheduler's heartbeat is the awaited one."""
    while True:
        beat = listener.wait_for(Heartbeat, "scheduler-0", PATIENCE).message
        assert isinstance(beat, Heartbeat)
        if awaited(beat):
            return


def test_a_process_serves_and_finishes_what_it_holds_before_it_leaves(
    network: Network, start: Start, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    frontend = Listener(network.node(Role.FRONTEND))
    detokenizer = Listener(network.node(Role.DETOKENIZER))
    log = tmp_path / "events"
    process = start(checkpoints("llama"), "--executor", "fake", "--event-log", str(log), "--overlap", "1")
    frontend.wait_for(PeerReady, "scheduler-0", timeout=PATIENCE)
    frontend.node.send("scheduler-0", request("a", PROMPT, n=2, max_new_tokens=20))
    assert tokens_at(detokenizer, 2) == {("a", choice): expected(20, choice) for choice in (0, 1)}
    assert log.stat().st_mode & 0o777 == 0o600, "prompts are in it"

    frontend.node.send("scheduler-0", PauseGenerationReq(id="p"))
    frontend.node.send("scheduler-0", request("held", PROMPT, max_new_tokens=300))
    frontend.wait_for(ControlReply, timeout=PATIENCE)
    wait_for_beat(frontend, lambda beat: "held" in beat.held.rids)  # or it would have nothing to stay for
    process.send_signal(signal.SIGTERM)
    wait_for_beat(frontend, lambda beat: beat.phase == Phase.DRAINING)
    frontend.node.send("scheduler-0", request("late", PROMPT))
    refused = frontend.wait_for(Rejected, timeout=PATIENCE).message
    assert isinstance(refused, Rejected)
    assert (refused.rid, refused.code, refused.retry) == ("late", "draining", True)
    assert process.poll() is None
    frontend.node.send("scheduler-0", ContinueGenerationReq(id="c"))
    assert tokens_at(detokenizer, 1) == {("held", 0): expected(300)}
    down = frontend.wait_for(PeerDown, timeout=PATIENCE).message
    assert isinstance(down, PeerDown)
    assert process.wait(PATIENCE) == 0
    with log.open("rb") as file:
        plans = [(logged, derived) for _, logged, derived in replay(read_events(file))]
    assert sum(logged is not None for logged, _ in plans) >= 320 // 8  # of tokens that are guessed a step has eight
    assert all(logged == derived for logged, derived in plans)


def test_a_bad_request_is_refused_and_the_real_executor_goes_on(
    network: Network, start: Start, checkpoints: Callable[[str], Path]
) -> None:
    frontend = Listener(network.node(Role.FRONTEND))
    detokenizer = Listener(network.node(Role.DETOKENIZER))
    process = start(checkpoints("llama"), "--device", "cpu", "--kv-cache-bytes", "10000000")
    frontend.wait_for(PeerReady, "scheduler-0", timeout=PATIENCE)
    bad: list[dict[str, Any]] = [
        {"logit_bias": {389: 1.0}},
        {"stop_token_ids": [400], "min_new_tokens": 2},
        {"top_k": 2**63},
    ]
    for number, options in enumerate(bad):
        frontend.node.send("scheduler-0", request(f"bad{number}", PROMPT, **options))
        refused = frontend.wait_for(Rejected, timeout=PATIENCE).message
        assert isinstance(refused, Rejected)
        assert (refused.rid, refused.code) == (f"bad{number}", "invalid_request")
    frontend.node.send("scheduler-0", request("good", PROMPT, max_new_tokens=3, ignore_eos=True))
    assert len(tokens_at(detokenizer, 1)["good", 0]) == 3
    assert process.poll() is None


def test_a_process_that_loads_leaves_at_once(
    network: Network, start: Start, checkpoints: Callable[[str], Path]
) -> None:
    frontend = Listener(network.node(Role.FRONTEND))
    process = start(checkpoints("llama"), "--device", "cpu")
    frontend.wait_for(PeerUp, timeout=PATIENCE)
    process.send_signal(signal.SIGTERM)
    down = frontend.wait_for(PeerDown, timeout=PATIENCE).message
    assert isinstance(down, PeerDown)
    assert "stopped" in down.reason
    assert process.wait(PATIENCE) == 0


FETCHED_FOR_EVER = """
import time
from tercet.scheduler import resolved_model as found_model
from tercet.scheduler.__main__ import main

found_model.resolve_any_model = lambda name: time.sleep(600)
main()
"""


def test_a_process_that_downloads_is_live_not_ready_and_stops_at_once(network: Network) -> None:
    frontend = Listener(network.node(Role.FRONTEND))
    address = f"ipc://{network.directory}"
    command = [sys.executable, "-c", FETCHED_FOR_EVER, "--peer", "scheduler-0", "--listen", address]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            frontend.wait_for(PeerUp, timeout=PATIENCE)
            frontend.node.send("scheduler-0", TokenizerFilesReq(id="t"))
            beat = frontend.wait_for(Heartbeat, timeout=PATIENCE).message
            assert isinstance(beat, Heartbeat)
            assert beat.phase == Phase.LOADING
            assert probe(address, Role.SCHEDULER, live=True, timeout=PATIENCE)
            assert not probe(address, Role.SCHEDULER, timeout=1.0)
            process.send_signal(signal.SIGTERM)
            down = frontend.wait_for(PeerDown, "scheduler-0", timeout=PATIENCE).message
            assert isinstance(down, PeerDown)
            assert "stopped" in down.reason
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()


def test_whoever_asks_for_files_before_the_model_is_found_gets_them_then(
    network: Network, checkpoints: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, asked = checkpoints("llama"), threading.Event()

    def resolve(name: str) -> Path:
        assert asked.wait(PATIENCE)
        return Path(name)

    monkeypatch.setattr(found_model, "resolve_any_model", resolve)
    with running(network, path) as (process, frontend):
        assert frontend.node.send("scheduler-0", TokenizerFilesReq(id="t"))
        while not process._early_file_requests:
            frontend.wait_for(Heartbeat, timeout=PATIENCE)
        asked.set()
        answer = frontend.wait_for(TokenizerFiles, timeout=PATIENCE).message
        assert isinstance(answer, TokenizerFiles)
        assert (answer.id, answer.model) == ("t", path.name)
        frontend.wait_for(PeerReady, timeout=PATIENCE)


TOLD_TO_LEAVE_IN_VAIN = """
import signal
import threading
from tercet.scheduler import wiring
from tercet.scheduler.executor_factory import EXECUTORS
from tercet.scheduler.__main__ import main

told, leave = threading.Event(), wiring.SchedulerProcess._exit_while_loading

def late(process):
    told.set()
    threading.main_thread().join(0.5)  # which it must not end in
    leave(process)

def load(*_):
    signal.raise_signal(signal.SIGTERM)
    told.wait()
    raise ImportError("half of a library")

wiring.SchedulerProcess._exit_while_loading = late
EXECUTORS["fake"] = load
main()
"""


def test_loading_that_fails_when_nobody_waits_for_it_is_no_failure(
    network: Network, checkpoints: Callable[[str], Path]
) -> None:
    command = [sys.executable, "-c", TOLD_TO_LEAVE_IN_VAIN, "--listen", f"ipc://{network.directory}"]
    command += ["--model", str(checkpoints("llama")), "--executor", "fake"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_other_weights_are_announced_and_served(
    network: Network, start: Start, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    model, new = checkpoints("llama"), tmp_path / "new"
    new.mkdir()
    shutil.copy(checkpoints("llama_tied") / "model.safetensors", new)
    start(model, "--executor", "fake")
    frontend, detokenizer = Listener(network.node(Role.FRONTEND)), Listener(network.node(Role.DETOKENIZER))
    first = frontend.wait_for(PeerReady, timeout=PATIENCE).message
    frontend.node.send("scheduler-0", UpdateWeightsFromDiskReq(id="gone", path=str(tmp_path / "none")))
    reply = frontend.wait_for(ControlReply, timeout=PATIENCE).message
    assert reply == ControlReply(id="gone", ok=False, message=f"{tmp_path / 'none'} is no directory")
    frontend.node.send("scheduler-0", UpdateWeightsFromDiskReq(id="w", path=str(new)))
    sent = len(frontend.heard)
    assert frontend.wait_for(ControlReply, timeout=PATIENCE).message == ControlReply(id="w", ok=True)
    heard = [each.message for each in frontend.heard[sent:] if isinstance(each.message, PeerReady)]
    second = heard[0] if heard else frontend.wait_for(PeerReady, timeout=PATIENCE).message
    assert isinstance(first, PeerReady)
    assert isinstance(second, PeerReady)
    old, served = first.ready.identity, second.ready.identity
    assert old is not None
    assert served is not None
    assert (served.weights_path, served.path, served.files) == (str(new), old.path, old.files)
    assert second.ready.limits == first.ready.limits
    options = ModelOptions(model=str(model), executor="fake")
    assert served == identity_of(options, resolve_served_model(options, str(new)))
    assert served.weights != old.weights
    detokenizer.wait_for(PeerUp, timeout=PATIENCE)
    frontend.node.send("scheduler-0", request("r", PROMPT, max_new_tokens=4, ignore_eos=True))
    said = tokens_at(detokenizer, 1)["r", 0]
    fake = FakeExecutor(small_capacity(vocab_size=389), weights=str(new))
    assert said[0] == fake.next_token(PROMPT) != expected(1)[0]


def test_a_bad_model_ends_the_process_with_one_line(start: Start, tmp_path: Path) -> None:
    process = start(tmp_path)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert errors.splitlines() == [f"tercet-scheduler: {tmp_path} is empty"]


class SilenceMeter(threading.Thread):
    """Drains a frontend's node, and measures the longest silence of a scheduler from one mark to the next."""

    def __init__(self, node: ThreadNode) -> None:
        super().__init__(daemon=True)
        self.node = node
        self.longest = 0.0
        self.kinds: dict[type, threading.Event] = {
            kind: threading.Event() for kind in (PeerUp, PeerReady, ControlReply)
        }
        self.stopping = False
        self._last: float | None = None

    def run(self) -> None:
        while not self.stopping:
            for delivery in self.node.drain(0.02):
                now = time.monotonic()
                if type(delivery.message) in self.kinds:
                    self.kinds[type(delivery.message)].set()
                if isinstance(delivery.message, Heartbeat):
                    if self._last is not None:
                        self.longest = max(self.longest, now - self._last)
                    self._last = now

    def mark(self) -> float:
        """The longest silence since the last mark."""
        longest, self.longest = self.longest, 0.0
        return longest


@pytest.mark.slow
def test_heartbeats_never_pause(network: Network, start: Start) -> None:
    """While a model loads, while 8000 tokens are prefilled in one step, and while a full cache is evicted."""
    meter = SilenceMeter(network.node(Role.FRONTEND))
    detokenizer = Listener(network.node(Role.DETOKENIZER))
    meter.start()
    start("embedded", "--device", "cpu", "--chunked-prefill-size", "8192", "--page-size", "1")
    assert meter.kinds[PeerReady].wait(PATIENCE)
    silences = {"loading": meter.mark()}
    for number in range(4):
        prompt = [5 + (number + at) % 3000 for at in range(2040)]
        meter.node.send("scheduler-0", request(f"r{number}", prompt, max_new_tokens=1, ignore_eos=True))
    tokens_at(detokenizer, 4)
    silences["prefill"] = meter.mark()
    meter.node.send("scheduler-0", FlushCacheReq(id="f"))
    assert meter.kinds[ControlReply].wait(PATIENCE)
    time.sleep(3 * network.heartbeat_interval)  # silence can only be measured by listening
    silences["eviction"] = meter.mark()
    meter.stopping = True
    meter.join()
    assert max(silences.values()) < 0.5, silences
