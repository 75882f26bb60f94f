"""Repeated faults under a continuous load: random kills, and parts restarted in turn."""

import random
import signal
import time

import pytest

from tests.chaos.conftest import References, Table
from tests.chaos.fault_injection import failures
from tests.chaos.load import SHORT, Job, Load, quantile, shuffled
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import Parts, assert_nothing_is_left

JOBS = shuffled(SHORT, 0)


@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, id="short"), pytest.param(100, id="full", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
async def test_kills_at_random_cost_no_request(double: Parts, references: References, table: Table, kills: int) -> None:
    """Both kills of the short form are of different roles."""
    expected = await references.of(double.server.url, JOBS)
    before = await double.resumed()
    chance, load = random.Random(kills), Load(double.server.url)
    restarts: list[float] = []

    async def inject_faults() -> None:
        for _ in range(kills):
            tokens = load.tokens + chance.randrange(20, 200)
            await load.until(lambda: load.tokens >= tokens)  # noqa: B023
            name = chance.choice([*double.of("scheduler"), *double.of("detokenizer")])
            restarts.append(await double.replaced(name, double.signal(name, signal.SIGKILL)))

    outcomes = await load.run_while(JOBS, inject_faults)
    assert failures(outcomes) == []
    resumed = await double.resumed() - before
    verdict = OutputCheck(double.server.url, expected).compare(outcomes)
    table.add(
        f"{kills} kills, {len(outcomes)} requests, {resumed} resumed; ready again after p50 "
        f"{quantile(restarts, 0.5):.2f} s, p99 {quantile(restarts, 0.99):.2f} s; "
        f"{verdict.ties} ties in {verdict.texts} texts"
    )
    assert resumed >= kills // 2
    assert verdict.ties <= max(1, verdict.texts // 500)
    assert_nothing_is_left(await double.idle())


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(0, id="short"), pytest.param(6, id="full", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])],
)
async def test_every_part_can_be_restarted_in_turn(
    double: Parts, references: References, table: Table, rounds: int
) -> None:
    """The short form restarts one part of each role once."""
    expected = await references.of(double.server.url, JOBS)
    load = Load(double.server.url)
    restarts: dict[str, float] = {}

    async def roll() -> None:
        for name in double.names * rounds or [name for name in double.names if name.endswith("-0")]:
            tokens = load.tokens + 100
            await load.until(lambda: load.tokens >= tokens)  # noqa: B023
            restarts[name] = await double.replaced(name, double.signal(name, signal.SIGTERM))

    outcomes = await load.run_while(JOBS, roll)
    table.add(
        f"{rounds} rounds, {len(outcomes)} requests, {len(failures(outcomes))} failed; at last "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in restarts.items())
    )
    assert failures(outcomes) == []
    verdict = OutputCheck(double.server.url, expected).compare(outcomes)
    assert verdict.ties <= max(1, verdict.texts // 500)
    assert_nothing_is_left(await double.idle())


@pytest.mark.parametrize(
    ("roles", "seconds"),
    [
        pytest.param(("frontend",), 0.0, id="short"),
        pytest.param(("scheduler", "detokenizer", "frontend"), 60.0, id="full", marks=pytest.mark.slow),
    ],
)
async def test_clients_that_keep_their_connections_notice_no_restart(
    double: Parts, references: References, table: Table, roles: tuple[str, ...], seconds: float
) -> None:
    """The next request follows an answer at once, on the same connection, even at a frontend that leaves."""
    jobs = [Job(number, tokens=16) for number in range(SHORT)]
    expected = await references.of(double.server.url, jobs)
    load = Load(double.server.url, kept=True)
    restarts: list[float] = []

    async def roll() -> None:
        end = time.monotonic() + seconds
        while not restarts or time.monotonic() < end:
            for name in [part for role in roles for part in double.of(role)] if seconds else double.of(*roles)[:1]:
                tokens = load.tokens + 50
                await load.until(lambda: load.tokens >= tokens)  # noqa: B023
                restarts.append(await double.replaced(name, double.signal(name, signal.SIGTERM)))

    outcomes = await load.run_while(jobs, roll)
    table.add(f"{len(restarts)} restarts, {len(outcomes)} requests, {len(failures(outcomes))} failed")
    assert failures(outcomes) == []
    verdict = OutputCheck(double.server.url, expected).compare(outcomes)
    assert verdict.ties <= max(1, verdict.texts // 500)
    assert_nothing_is_left(await double.idle())
