"""Parts without a supervisor join a running server, take their share of its requests, and leave again."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from tests.chaos.conftest import ENVIRONMENT, References
from tests.chaos.fault_injection import failures
from tests.chaos.load import SHORT, Load, shuffled
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import Parts, assert_nothing_is_left
from tests.part_process import ChildProcess, until
from tests.server_process import Server

SCHEDULER, DETOKENIZER = "scheduler-joined", "detokenizer-joined"


def tokens(server: Server, name: str) -> int:
    """Return the tokens that a scheduler has generated; -1 while the frontend does not know it as ready."""
    schedulers = server.get("/server_info")["schedulers"]
    return next((each["load"]["output_tokens"] for each in schedulers if each["peer"] == name and each["ready"]), -1)


def strangers(server: Server) -> set[str]:
    """Return the joined parts that the frontend knows."""
    info = server.get("/server_info")
    return {each["peer"] for each in (*info["schedulers"], *info["detokenizers"])} & {SCHEDULER, DETOKENIZER}


def start(name: str, parts: Parts, tmp_path: Path, *options: str) -> ChildProcess:
    """Start an additional part at an address where the server's frontends look for parts."""
    command = [sys.executable, "-m", f"tercet.{name.partition('-')[0]}", "--peer", name, "--listen", parts.listen]
    return ChildProcess([*command, *options], tmp_path / name, env=ENVIRONMENT)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)], ids=["leaving", "killed"]
)
async def test_parts_that_join_share_the_work_and_lose_nothing_when_they_go(
    single: Parts, references: References, tmp_path: Path, number: signal.Signals
) -> None:
    jobs = shuffled(SHORT, 0)
    server = single.server
    expected = await references.of(server.url, jobs)
    load = Load(server.url)

    async def come_and_go() -> None:
        model = "--model=embedded", "--dtype=float32", f"--kv-cache-bytes={64 * 2**20}", "--threads=1"
        joined = [start(SCHEDULER, single, tmp_path, *model), start(DETOKENIZER, single, tmp_path)]
        try:
            await asyncio.to_thread(until, lambda: tokens(server, SCHEDULER) > 200, lambda: joined[0].output)
            assert strangers(server) == {SCHEDULER, DETOKENIZER}
            for part in joined:
                part.process.send_signal(number)
            codes = [await asyncio.to_thread(part.process.wait, 30) for part in joined]
            assert codes == [0 if number is signal.SIGTERM else -number] * 2
            await asyncio.to_thread(until, lambda: not strangers(server), lambda: "still known")
        finally:
            for part in joined:
                part.kill()

    outcomes = await load.run_while(jobs, come_and_go)
    assert failures(outcomes) == []
    OutputCheck(server.url, expected).compare(outcomes)
    assert_nothing_is_left(await single.idle())
