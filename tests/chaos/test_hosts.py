"""A model on two hosts, which are network namespaces: ranks and hosts that die, hang and are cut off under load.

Texts are compared with those of a server of one process. Answers are short, because ranks of two hosts exchange sums by
sockets for each token: a case with 800 requests takes minutes. Name one by `-k`.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tercet.protocol.transport.keys import write_keys
from tests.chaos.conftest import ENVIRONMENT, OPTIONS, References, Table
from tests.chaos.fault_injection import failures, machine_load
from tests.chaos.load import FULL, Job, Load, Outcome, shuffled
from tests.chaos.output_check import Ids, OutputCheck, Verdict
from tests.chaos.parts import option_of
from tests.deploy_files import compose, part_of
from tests.namespaces import Network, why_not
from tests.server_process import START_LIMIT, Server
from tests.two_hosts import Host, command_of, ranks_of, scheduler_of

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=f"network namespaces: {REASON}"),
    pytest.mark.timeout(3600),
    pytest.mark.slow,
]

ADDRESSES = {"near": "10.204.0.10", "far": "10.204.0.20", "other": "10.204.0.30"}
COUNTS = [pytest.param(48, id="short"), pytest.param(FULL, id="full")]
CUT = 10.0
"""Seconds for which the link is cut."""
NOTICED = 3.0
"""Seconds within which the hosts end their ranks."""
TOKENS = 40
"""Tokens of an answer, or a few more."""
MOVED = 5.0
"""Seconds within which another scheduler takes over."""


class TwoHosts:
    """Both hosts, with one rank each. Clients are on the first.

    With two replicas, there is another scheduler with the same model, which is one process.
    """

    def __init__(self, network: Network, place: Path, replicas: int) -> None:
        self.network = network
        self.replicas = replicas
        write_keys(place / "keys")
        self._links = ["--dist-init-addr", f"{ADDRESSES['near']}:5000", "--keys", str(place / "keys" / "scheduler")]
        self.far = self._start("far", "--node-rank", "1", "--threads", "1")
        options = (*OPTIONS, "--frontend.routing-policy", "round_robin", "--port", "0")
        self.near = self._start("near", *options, "--tp", "2", "--nnodes", "2")
        if replicas > 1:
            self.near.wait()
            listen = option_of(scheduler_of(self.near.process), "--listen")
            command = [sys.executable, "-m", "tercet.scheduler", "--listen", listen, "--peer", "scheduler-1"]
            command += ["--dtype", "float32", "--kv-cache-bytes", str(64 << 20), "--threads", "1"]
            network.start("other", *command, env=ENVIRONMENT)

    def wait(self) -> None:
        """Wait until all schedulers and ranks are ready."""
        self.near.wait()
        self.far.wait()
        end = time.monotonic() + START_LIMIT
        while self.network.on("near", self._schedulers) < self.replicas or not ranks_of(self.far.process):
            assert time.monotonic() < end, "\n".join(self.near.lines)
            time.sleep(0.2)

    def _schedulers(self) -> int:
        with urllib.request.urlopen(f"{self.near.url}/server_info", timeout=10) as response:
            return len(json.load(response)["schedulers"])

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
        self.network.start(host, *command, env=ENVIRONMENT, stdout=subprocess.PIPE)
        return Host(self.network.processes[host])


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "beside another"])
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    network = Network(ADDRESSES, {})
    try:
        hosts = TwoHosts(network, tmp_path_factory.mktemp("hosts"), request.param)
        yield hosts
    finally:
        ends = network.close()
    assert not any(ends.values()), ends


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
async def test_no_request_fails_with_a_rank_or_a_host(
    hosts: TwoHosts,
    one_of_each: Server,
    references: References,
    table: Table,
    fault: Callable[[TwoHosts], Awaitable[None]],
    count: int,
) -> None:
    jobs = shuffled(count, 1, tokens=TOKENS)
    expected = await references.of(one_of_each.url, jobs)
    await asyncio.to_thread(hosts.wait)
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

    outcomes = await asyncio.to_thread(hosts.run, jobs, inject)
    assert failures(outcomes) == []
    verdict = await asyncio.to_thread(hosts.compare, outcomes, expected)
    assert verdict.ties <= max(1, verdict.texts // 250)  # sums of two ranks have another order than those of one
    assert noticed < NOTICED * machine_load()
    assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
    stalls = [each.stall(injected) for each in outcomes if each.under_way(injected)]
    assert stalls
    table.add(
        f"{len(outcomes)} requests, 0 failed; {len(stalls)} streams under way; noticed after {noticed:.1f} s; all move "
        f"again after {max(stalls):.1f} s; {verdict.ties} ties in {verdict.texts} texts; "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    assert hosts.replicas == 1 or max(stalls) < MOVED * machine_load()


def test_the_commands_of_compose_serve_a_model_on_two_hosts(tmp_path: Path) -> None:
    """Two pipeline stages, by the command lines of deploy/compose-hosts.yaml."""
    addresses = {"near": "10.205.0.10", "far": "10.205.0.20"}
    network = Network(addresses, {})
    write_keys(tmp_path)
    values = {"127.0.0.1:30150": f"{addresses['near']}:30150", "size=8": "size=1"}
    processes: list[subprocess.Popen[str]] = []
    try:
        for name, service in compose("compose-hosts.yaml")["services"].items():
            part = part_of(name)
            words = service["command"]
            for old, new in {**values, "/keys": str(tmp_path / part)}.items():
                words = [word.replace(old, new) for word in words]
            host = "far" if name == "ranks" else "near"
            command = [str(Path(sys.executable).with_name(f"tercet-{part}")), *words]
            network.start(host, *command, env={"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(tmp_path)})
            processes.append(network.processes.pop(host))
        body = json.dumps({"text": "A tercet is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}}).encode()

        def ask() -> str:
            headers = {"content-type": "application/json"}
            query = urllib.request.Request("http://127.0.0.1:8000/generate", body, headers)
            with urllib.request.urlopen(query, timeout=120) as response:
                return str(json.load(response)["text"])

        network.on("near", lambda: wait_until_healthy("http://127.0.0.1:8000/health"))
        assert network.on("near", ask)
    finally:
        for process in processes:
            process.terminate()
        ends = [process.wait(60) for process in processes]
        network.close()
    assert not any(ends), ends


def wait_until_healthy(url: str) -> None:
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.2)
