"""A model on two hosts, which are network namespaces: ranks and hosts that die, hang and are cut off under load."""

import asyncio
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tercet.protocol.transport.keys import write_keys
from tests.chaos.conftest import OPTIONS, Table
from tests.chaos.fault_injection import failures, machine_load
from tests.chaos.load import FULL, Job, Load, Outcome, shuffled
from tests.chaos.output_check import Ids, OutputCheck, Verdict
from tests.namespaces import Network, why_not
from tests.two_hosts import Host, command_of, ranks_of, scheduler_of

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=f"network namespaces: {REASON}"),
    pytest.mark.timeout(3600),
    pytest.mark.slow,
]

ADDRESSES = {"near": "10.204.0.10", "far": "10.204.0.20"}
COUNTS = [pytest.param(48, id="short"), pytest.param(FULL, id="full")]
CUT = 10.0
"""Seconds for which the link is cut."""
NOTICED = 3.0
"""Seconds within which the hosts end their ranks."""


class TwoHosts:
    """Both hosts, with one rank each. Clients are on the first."""

    def __init__(self, network: Network, place: Path) -> None:
        self.network = network
        write_keys(place / "keys")
        self._links = ["--dist-init-addr", f"{ADDRESSES['near']}:5000", "--keys", str(place / "keys" / "scheduler")]
        self.far = self._start("far", "--node-rank", "1", "--threads", "1")
        self.near = self._start("near", *OPTIONS, "--tp", "2", "--nnodes", "2", "--port", "0")

    def restart_far(self) -> None:
        """Kill all processes of the second host at once, and start it again."""
        processes = [scheduler_of(self.far.process), *ranks_of(self.far.process)]
        for each in [psutil.Process(self.far.process.pid), *processes]:
            each.kill()
        self.far.process.wait()
        self.far = self._start("far", "--node-rank", "1", "--threads", "1")

    def run(self, jobs: Sequence[Job], during: Callable[[Load], Awaitable[object]] | None = None) -> list[Outcome]:
        """Run jobs on the first host, and `during` beside them."""

        async def work() -> list[Outcome]:
            load = Load(self.near.url)
            return await load.run(jobs, None if during is None else lambda: during(load))

        return self.network.on("near", lambda: asyncio.run(work()))

    def compare(self, outcomes: Sequence[Outcome], expected: dict[Job, Ids]) -> Verdict:
        """Compare texts with those of a run without faults."""
        return self.network.on("near", lambda: OutputCheck(self.near.url, expected).compare(outcomes))

    def _start(self, host: str, *options: str) -> Host:
        command = command_of("embedded", *options, *self._links)
        self.network.start(host, *command, env={"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)
        return Host(self.network.processes[host])


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    network = Network(ADDRESSES, {})
    try:
        hosts = TwoHosts(network, tmp_path_factory.mktemp("hosts"))
        hosts.near.wait()
        hosts.far.wait()
        yield hosts
    finally:
        ends = network.close()
    assert not any(ends.values()), ends


@pytest.fixture(scope="module")
def expected() -> dict[Job, Ids]:
    """Answers of earlier runs without faults, by job."""
    return {}


async def cut(hosts: TwoHosts) -> None:
    hosts.network.cut("near", "far")
    await asyncio.sleep(CUT)
    hosts.network.mend("near", "far")


async def kill_far_rank(hosts: TwoHosts) -> None:
    ranks_of(hosts.far.process)[0].kill()


async def stop_far_rank(hosts: TwoHosts) -> None:
    ranks_of(hosts.far.process)[0].suspend()


async def kill_near_rank(hosts: TwoHosts) -> None:
    scheduler_of(hosts.near.process).kill()


async def restart_far(hosts: TwoHosts) -> None:
    hosts.restart_far()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("fault", [kill_far_rank, kill_near_rank, stop_far_rank, restart_far, cut])
def test_no_request_fails_with_a_rank_or_a_host(
    hosts: TwoHosts, expected: dict[Job, Ids], table: Table, fault: Callable[[TwoHosts], Awaitable[None]], count: int
) -> None:
    jobs = shuffled(count, 1)
    if missing := [job for job in jobs if job not in expected]:
        expected |= {each.job: each.ids for each in hosts.run(missing)}
    injected, noticed, lines = 0.0, 0.0, len(hosts.near.lines)
    rank = ranks_of(hosts.far.process)[0]

    async def inject(load: Load) -> None:
        nonlocal injected, noticed
        tokens = sum(job.length * job.n for job in jobs if job.streamed)
        await load.until(lambda: load.tokens >= tokens // 4)
        injected = time.monotonic()
        watching = asyncio.create_task(asyncio.to_thread(hosts.near.heard_at, "it starts again", lines))
        await fault(hosts)
        noticed = await watching - injected

    outcomes = hosts.run(jobs, inject)
    assert failures(outcomes) == []
    verdict = hosts.compare(outcomes, expected)
    assert verdict.ties <= max(1, verdict.texts // 500)
    assert noticed < NOTICED * machine_load()
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    stalls = [each.stall(injected) for each in outcomes if each.under_way(injected)]
    assert stalls
    table.add(
        f"{len(outcomes)} requests, 0 failed; {len(stalls)} streams under way; noticed after {noticed:.1f} s; all move "
        f"again after {max(stalls):.1f} s; {verdict.ties} ties in {verdict.texts} texts"
    )
