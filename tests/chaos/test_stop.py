"""SIGSTOP: a part that hangs is replaced; one that continues in time has missed nothing."""

import asyncio
import os
import random
import signal
import time

import pytest

from tests.chaos.conftest import References, Table
from tests.chaos.fault_injection import FaultInjection, assert_nothing_is_lost, failures
from tests.chaos.load import FULL, SHORT, shuffled
from tests.chaos.parts import Parts, assert_nothing_is_left

LONG = [pytest.mark.slow, pytest.mark.timeout(7200)]
ASLEEP = 4.0
"""Seconds: longer than the heartbeat timeout of peers, shorter than that of the supervisor."""
PAUSED = 40.0
"""Seconds: longer than any step may take."""


@pytest.mark.parametrize(
    ("role", "count", "seed"),
    [
        pytest.param("scheduler", SHORT, 1, id="scheduler-short"),
        *[
            pytest.param(role, FULL, seed, id=f"{role}-full-{seed}", marks=LONG)
            for role in ("scheduler", "detokenizer")
            for seed in range(10)
        ],
    ],
)
async def test_requests_of_a_part_that_hangs_go_on_elsewhere(
    double: Parts, references: References, table: Table, role: str, count: int, seed: int
) -> None:
    fault = FaultInjection(double, role, signal.SIGSTOP)
    await assert_nothing_is_lost(double, references, table, fault, shuffled(count, seed), random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_requests_wait_for_the_replacement_of_the_only_part_that_hangs(
    single: Parts, references: References, table: Table, role: str
) -> None:
    fault = FaultInjection(single, role, signal.SIGSTOP)
    await assert_nothing_is_lost(single, references, table, fault, shuffled(SHORT, 1), random.Random(1))


class Sleep(FaultInjection):
    """Fault: a part stops for a while, and continues as the same process."""

    async def _apply(self) -> None:
        pid = self.parts.signal(self.name, signal.SIGSTOP)
        await asyncio.sleep(ASLEEP)
        assert self.parts.signal(self.name, signal.SIGCONT) == pid
        await self.parts.ready()
        self.restart_seconds = time.monotonic() - self.injected_at


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "frontend"])
async def test_a_part_that_slept_and_goes_on_repeats_nothing(
    double: Parts, references: References, table: Table, role: str
) -> None:
    fault = Sleep(double, role)
    enough = 0 if role == "frontend" else 2  # messages sent to it meanwhile may be the only effect
    await assert_nothing_is_lost(double, references, table, fault, shuffled(SHORT, 1), random.Random(1), enough=enough)


class MachineSleep(FaultInjection):
    """Fault: all parts and their supervisor stop, and continue in any order."""

    async def _apply(self) -> None:
        self.pids = [*self.parts.pids().values(), self.parts.server.process.pid]
        for pid in self.pids:
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(PAUSED)
        for pid in random.Random(1).sample(self.pids, len(self.pids)):
            os.kill(pid, signal.SIGCONT)
        await self.parts.ready()
        self.restart_seconds = time.monotonic() - self.injected_at


@pytest.mark.slow
async def test_a_machine_that_slept_kills_nobody(double: Parts, references: References, table: Table) -> None:
    fault = MachineSleep(double, "scheduler")
    await assert_nothing_is_lost(double, references, table, fault, shuffled(SHORT, 1), random.Random(1), enough=0)
    assert [*double.pids().values(), double.server.process.pid] == fault.pids


@pytest.mark.slow
async def test_a_frontend_that_hangs_takes_only_its_own_connections_along(
    double: Parts, references: References, table: Table
) -> None:
    jobs = shuffled(SHORT, 0)
    await references.of(double.server.url, jobs)
    fault = FaultInjection(double, "frontend", signal.SIGSTOP)
    outcomes = await fault.run(jobs, random.Random(0))
    failed = [each for each in outcomes if not each.finished]
    assert all(each.frontend in {"", fault.name} for each in failed), failures(outcomes)
    table.add(f"{len(failed)} of {len(outcomes)} requests failed")
    assert_nothing_is_left(await double.idle())
