"""The topology of deploy/compose.yaml in network namespaces: parts found by name, keys, and links cut for a while.

Every part runs compose's own command line, on a host with an address of its own and with its own folder of keys.
"""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.chaos.conftest import References, Table
from tests.chaos.fault_injection import failures
from tests.chaos.load import FULL, Load, Outcome, quantile, shuffled
from tests.chaos.output_check import OutputCheck, Verdict
from tests.compose_server import URL, ComposeServer
from tests.deploy_files import ROOT, manifests
from tests.namespaces import Network, why_not

REASON = why_not()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=f"network namespaces: {REASON}"), pytest.mark.timeout(600)]

ADDRESSES = {
    "frontend": "10.203.0.10",
    "scheduler-1": "10.203.0.21",
    "scheduler-2": "10.203.0.22",
    "scheduler-3": "10.203.0.23",
    "detokenizer": "10.203.0.30",
    "client": "10.203.0.40",
}
CLIENTS = 4
CUTS = [pytest.param(5.0, id="short"), pytest.param(10.0, id="full", marks=pytest.mark.slow)]
"""Seconds, all longer than the heartbeat timeout."""
START_LIMIT = 120.0
RECOVERY_LIMIT = 60.0


class Traffic:
    """Clients on the host `client` that send one request after the other, and their answers."""

    def __init__(self, network: Network) -> None:
        script = str(ROOT / "tests" / "steady_traffic.py")
        network.start(
            "client", sys.executable, script, URL, str(CLIENTS), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._process = network.processes.pop("client")
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()
            self._reader.join()

    def answers(self) -> list[dict[str, Any]]:
        """Return every answer so far. Raises AssertionError with the client's text for a failed one."""
        try:
            return [json.loads(line) for line in list(self.lines)]
        except ValueError:
            raise AssertionError("\n".join(self.lines)) from None

    def wait_for_all(self, begun_after: float) -> float:
        """Wait until every client has an answer to a request begun after `begun_after`; return the time of the last."""
        ends: dict[int, float] = {}

        def enough() -> bool:
            assert self._process.poll() is None, "\n".join(self.lines)
            for each in self.answers():
                if each["began"] > begun_after:
                    ends.setdefault(each["client"], each["ended"])
            return len(ends) == CLIENTS

        until(enough, RECOVERY_LIMIT, lambda: f"of {CLIENTS} clients only {sorted(ends)} went on", pause=0.1)
        return max(ends.values())

    def stop(self) -> list[dict[str, Any]]:
        """Return every answer, after the clients have received their last."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(RECOVERY_LIMIT) == 0, "\n".join(self.lines)
        self._reader.join()
        return self.answers()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(iter(self._process.stdout.readline, ""))


def until(condition: Callable[[], bool], limit: float, complaint: Callable[[], str], pause: float = 0.5) -> None:
    """Wait for a condition. Most start a process each time, which takes the time of those that they wait for."""
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, complaint()
        time.sleep(pause)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    names = {
        "frontend": ["frontend"],
        "scheduler": ["scheduler-1", "scheduler-2"],
        "detokenizer": ["detokenizer"],
    }
    network = Network(ADDRESSES, names)
    try:
        yield network
    finally:
        ends = network.close()
    assert not any(ends.values()), ends


@pytest.fixture(scope="module")
def server(network: Network, tmp_path_factory: pytest.TempPathFactory) -> ComposeServer:
    server = ComposeServer(network, tmp_path_factory.mktemp("deployment"))
    for _ in range(2):  # as on every `docker compose up`: the second run keeps the files of the first
        subprocess.run(server.keys, check=True, timeout=60)
    hosts = ["scheduler-1", "scheduler-2", "detokenizer", "frontend"]
    for host in hosts:
        server.start(host)
    for host in hosts:
        until(lambda host=host: server.healthy(host), START_LIMIT, server.logs)  # type: ignore[misc]
    until(lambda: server.schedulers() == 2, START_LIMIT, server.logs)
    return server


def cut_off(network: Network, traffic: Traffic, one: str, other: str, seconds: float) -> tuple[float, float]:
    """Cut a link under traffic for `seconds`; return the times of the cut and of its end."""
    traffic.wait_for_all(begun_after=time.monotonic())
    network.cut(one, other)
    cut = time.monotonic()
    time.sleep(seconds)
    network.mend(one, other)
    return cut, time.monotonic()


def check(answers: list[dict[str, Any]], server: ComposeServer) -> None:
    """Assert that no answer failed, and that each prompt has one continuation despite redispatches."""
    failed = [each for each in answers if each["error"]]
    assert not failed, f"{len(failed)} of {len(answers)} failed, first {failed[0]}\n{server.logs()}"
    texts = {(each["prompt"], each["text"]) for each in answers}
    assert len(texts) == CLIENTS, texts


def test_a_cut_link_passes_nothing_and_others_everything(network: Network) -> None:
    listen = "import socket as s; l = s.create_server(('0.0.0.0', 9)); print('on', flush=True)\nwhile 1: l.accept()"
    connect = "import socket as s, sys; s.create_connection((sys.argv[1], 9), timeout=1)"

    def reaches(sender: str) -> bool:
        return network.call(sender, sys.executable, "-c", connect, ADDRESSES["client"]).returncode == 0

    network.start("client", sys.executable, "-c", listen, stdout=subprocess.PIPE)
    process = network.processes.pop("client")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        network.cut("client", "frontend")
        assert (reaches("frontend"), reaches("detokenizer")) == (False, True)
        network.mend("client", "frontend")
        until(lambda: reaches("frontend"), 10.0, lambda: "the link is not back")  # neighbors are resolved anew
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("seconds", CUTS)
def test_requests_go_to_another_scheduler_while_one_is_cut_off(
    network: Network, server: ComposeServer, table: Table, seconds: float
) -> None:
    with Traffic(network) as traffic:
        cut, mended = cut_off(network, traffic, "scheduler-1", "frontend", seconds)
        again = traffic.wait_for_all(begun_after=mended)
        until(lambda: server.schedulers() == 2, RECOVERY_LIMIT, server.logs)
        answers = traffic.stop()
    check(answers, server)
    inside = [each for each in answers if cut + seconds / 2 < each["began"] and each["ended"] < mended]
    assert inside, f"nothing was served by the other scheduler\n{server.logs()}"
    longest = max(each["ended"] - each["began"] for each in answers)
    table.add(
        f"{len(answers)} requests, 0 failed; longest {longest:.1f} s; {len(inside)} served meanwhile; "
        f"all move again {again - mended:.1f} s after the link is back"
    )


@pytest.mark.slow
@pytest.mark.parametrize("seconds", CUTS)
def test_requests_wait_while_the_only_detokenizer_is_cut_off(
    network: Network, server: ComposeServer, table: Table, seconds: float
) -> None:
    with Traffic(network) as traffic:
        cut, mended = cut_off(network, traffic, "detokenizer", "frontend", seconds)
        again = traffic.wait_for_all(begun_after=mended)
        answers = traffic.stop()
    check(answers, server)
    assert not [each for each in answers if cut + 1 < each["ended"] < mended], "text came through a cut link"
    table.add(f"{len(answers)} requests, 0 failed; all move again {again - mended:.1f} s after the link is back")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [10.0])
def test_requests_go_on_while_a_scheduler_reaches_no_detokenizer(
    network: Network, server: ComposeServer, table: Table, seconds: float
) -> None:
    """The frontend reaches every part: it only sees that nothing arrives through one scheduler."""
    with Traffic(network) as traffic:
        cut, mended = cut_off(network, traffic, "scheduler-1", "detokenizer", seconds)
        again = traffic.wait_for_all(begun_after=mended)
        answers = traffic.stop()
    check(answers, server)
    longest = max(each["ended"] - each["began"] for each in answers)
    inside = [each for each in answers if cut < each["began"] and each["ended"] < mended]
    table.add(
        f"{len(answers)} requests, 0 failed; longest {longest:.1f} s; {len(inside)} served meanwhile; "
        f"all move again {again - mended:.1f} s after the link is back"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("host", ["scheduler-1", "detokenizer"])
def test_a_whole_load_goes_through_a_cut_of_ten_seconds(
    network: Network, server: ComposeServer, references: References, table: Table, host: str, seed: int
) -> None:
    """During the load of the kill tests, nothing passes between the frontend and a part."""
    url = URL.replace("frontend", ADDRESSES["frontend"])
    jobs, chance = shuffled(FULL, seed), random.Random(seed)
    moment = 0.0

    async def cut_once(load: Load, tokens: int) -> None:
        nonlocal moment
        await load.until(lambda: load.tokens >= tokens)
        network.cut(host, "frontend")
        moment = time.monotonic()
        await asyncio.sleep(10.0)
        network.mend(host, "frontend")

    async def run() -> tuple[list[Outcome], Verdict]:
        expected = await references.of(url, jobs)
        load, tokens = Load(url), sum(job.length * job.n for job in jobs if job.streamed)
        outcomes = await load.run(jobs, lambda: cut_once(load, chance.randrange(tokens // 8, tokens // 2)))
        return outcomes, OutputCheck(url, expected).compare(outcomes)

    before = server.info()["requests_resumed_and_finished"]
    outcomes, verdict = network.on("client", lambda: asyncio.run(run()))
    resumed = server.info()["requests_resumed_and_finished"] - before
    stalls = [each.stall(moment) for each in outcomes if each.under_way(moment)]
    table.add(
        f"{len(outcomes)} requests, {len(failures(outcomes))} failed, {len(stalls)} streams under way, "
        f"{resumed} resumed; "
        f"longest pause p50 {quantile(stalls, 0.5):.2f} s, p99 {quantile(stalls, 0.99):.2f} s; "
        f"{verdict.ties} ties in {verdict.texts} texts"
    )
    assert failures(outcomes) == [], server.logs()
    assert resumed >= 2
    assert verdict.ties <= max(1, verdict.texts // 500)
    until(lambda: not any(each["load"]["running"] for each in server.info()["schedulers"]), 20.0, server.logs)
    for load in (each["load"] for each in server.info()["schedulers"]):
        assert load["pages_free"] + load["pages_cached"] == load["pages_total"]
        assert load["slots_free"] == load["slots_total"]


def test_a_scheduler_added_to_the_name_is_found(network: Network, server: ComposeServer) -> None:
    server.start("scheduler-3")
    names = {
        "frontend": ["frontend"],
        "scheduler": ["scheduler-1", "scheduler-2", "scheduler-3"],
        "detokenizer": ["detokenizer"],
    }
    network.resolve(names)
    until(lambda: server.schedulers() == 3, START_LIMIT, server.logs)
    scaled_by = manifests("HorizontalPodAutoscaler")["scheduler"]["spec"]["metrics"][0]["external"]["metric"]["name"]
    told = [line for line in server.get("/metrics").splitlines() if line.startswith(f"{scaled_by}{{")]
    assert [line.endswith(" 0.0") for line in told if 'scheduler="scheduler-3"' in line] == [True]


def test_other_keys_open_nothing(network: Network, server: ComposeServer, tmp_path: Path) -> None:
    subprocess.run([*server.keys[:2], str(tmp_path / "others")], check=True, timeout=60)
    program, *words = server.health_command("scheduler-1")
    own = words[words.index("--keys") + 1]
    address = [word.replace("127.0.0.1", ADDRESSES["scheduler-1"]) for word in words]
    other = [word.replace(own, str(tmp_path / "others" / "scheduler")) for word in address]
    assert network.call("scheduler-2", program, *other).returncode == 1
    assert network.call("scheduler-2", program, *address).returncode == 0
