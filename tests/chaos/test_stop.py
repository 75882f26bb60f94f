"""SIGSTOP: a part that hangs is passed by, killed and replaced; one that goes on in time has missed nothing."""

import asyncio
import random
import signal
import time

import pytest

from tests.chaos.blow import Blow, assert_nothing_is_lost, failures
from tests.chaos.conftest import References, Table
from tests.chaos.load import Job
from tests.chaos.parts import Parts, assert_nothing_is_left

SEEDS = [
    pytest.param(0, id="short"),
    *(pytest.param(seed, id=f"full-{seed}", marks=pytest.mark.slow) for seed in (1, 2)),
]
ASLEEP = 4.0
"""Seconds: longer than silence is borne by peers, shorter than by the supervisor."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_requests_of_a_part_that_hangs_go_on_elsewhere(
    double: Parts, references: References, table: Table, role: str, seed: int
) -> None:
    blow = Blow(double, role, signal.SIGSTOP)
    jobs = [Job(number) for number in range(24)]
    await assert_nothing_is_lost(double, references, table, blow, jobs, random.Random(seed))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_requests_wait_for_the_replacement_of_the_only_part_that_hangs(
    single: Parts, references: References, table: Table, role: str
) -> None:
    blow = Blow(single, role, signal.SIGSTOP)
    await assert_nothing_is_lost(
        single, references, table, blow, [Job(number) for number in range(24)], random.Random(0)
    )


class Sleep(Blow):
    """A part that stops for a while, and goes on as the process it was."""

    async def _hit(self) -> None:
        pid = self.parts.signal(self.name, signal.SIGSTOP)
        await asyncio.sleep(ASLEEP)
        assert self.parts.signal(self.name, signal.SIGCONT) == pid
        await self.parts.ready()
        self.restart = time.monotonic() - self.moment


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_a_part_that_slept_and_goes_on_repeats_nothing(
    double: Parts, references: References, table: Table, role: str, seed: int
) -> None:
    blow = Sleep(double, role)
    jobs = [Job(number) for number in range(24)]
    await assert_nothing_is_lost(double, references, table, blow, jobs, random.Random(seed))


@pytest.mark.slow
async def test_a_frontend_that_hangs_takes_only_its_own_connections_along(
    double: Parts, references: References, table: Table
) -> None:
    jobs = [Job(number) for number in range(24)]
    await references.of(double.server, jobs)
    blow = Blow(double, "frontend", signal.SIGSTOP)
    outcomes = await blow.under(jobs, random.Random(0))
    failed = [each for each in outcomes if not each.finished]
    assert all(each.frontend in {"", blow.name} for each in failed), failures(outcomes)
    table.add(f"{len(failed)} of {len(outcomes)} requests failed")
    assert_nothing_is_left(await double.idle())
