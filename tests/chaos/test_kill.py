"""`kill -9` of a serving part: every request finishes with its reference output."""

import random

import pytest

from tests.chaos.conftest import References, Table
from tests.chaos.fault_injection import FaultInjection, assert_nothing_is_lost, failures, machine_load
from tests.chaos.load import FULL, SHORT, shuffled
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import Parts, assert_nothing_is_left

LONG = [pytest.mark.slow, pytest.mark.timeout(7200)]
CASES = [
    pytest.param(SHORT, 0, id="short"),
    *(pytest.param(FULL, seed, id=f"full-{seed}", marks=LONG) for seed in range(10)),
]
"""Number of requests, and the seed of their order and of the time of the fault."""
ENOUGH = {SHORT: 2, FULL: 6}
"""Least number of resumed requests for the fault to count."""
ONE, TWO = 4.0, 1.0
"""Seconds until all streams continue, with one part of the role and with two."""


@pytest.mark.parametrize(("count", "seed"), CASES)
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_request_outlives_the_only_part_of_its_role(
    single: Parts, references: References, table: Table, role: str, count: int, seed: int
) -> None:
    fault = FaultInjection(single, role)
    jobs, chance = shuffled(count, seed), random.Random(seed)
    await assert_nothing_is_lost(single, references, table, fault, jobs, chance, enough=ENOUGH[count])
    if count == FULL:
        assert fault.stalled < ONE * machine_load()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), CASES)
@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_request_outlives_one_of_two(
    double: Parts, references: References, table: Table, role: str, count: int, seed: int
) -> None:
    """In an ordinary run, kills at random in `test_repeated_faults.py` take one of each role."""
    fault = FaultInjection(double, role)
    jobs, chance = shuffled(count, seed), random.Random(seed)
    await assert_nothing_is_lost(double, references, table, fault, jobs, chance)
    if count == FULL:
        assert fault.stalled < TWO * machine_load()


@pytest.mark.parametrize(("count", "seed"), CASES)
async def test_a_frontend_takes_only_its_own_connections_along(
    double: Parts, references: References, table: Table, count: int, seed: int
) -> None:
    jobs = shuffled(count, seed)
    expected = await references.of(double.server.url, jobs)
    fault = FaultInjection(double, "frontend")
    outcomes = await fault.run(jobs, random.Random(seed))
    failed = [each for each in outcomes if not each.finished]
    assert all(each.frontend in {"", fault.name} for each in failed), failures(outcomes)
    assert all(each.began < fault.injected_at for each in failed), failures(outcomes)
    lived = [
        each
        for each in outcomes
        if each.finished
        and each.began < fault.injected_at < each.ended
        and each.frontend != fault.name  # its last messages may be read after its death
    ]
    verdict = OutputCheck(double.server.url, expected).compare([each for each in outcomes if each.finished])
    table.add(f"{len(failed)} of {len(outcomes)} requests failed; {len(lived)} others were under way and finished")
    assert failed
    assert lived
    assert verdict.ties <= max(1, verdict.texts // 500)
    assert_nothing_is_left(await double.idle())
