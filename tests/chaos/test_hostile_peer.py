"""Garbage and invalid messages at every inbox of a busy server: no part fails, no request suffers, nothing is left."""

import asyncio
import random
import time

import pytest

from tercet.protocol.messages.values import Role
from tests.chaos.conftest import References, Table
from tests.chaos.fault_injection import failures
from tests.chaos.hostile_peer import HostilePeer
from tests.chaos.load import SHORT, Load, shuffled
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import Parts, assert_nothing_is_left

ROLES = (Role.FRONTEND, Role.SCHEDULER, Role.DETOKENIZER)
LONG = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("seconds", "seed"),
    [pytest.param(2.0, 0, id="short"), *(pytest.param(60.0, seed, id=f"full-{seed}", marks=LONG) for seed in range(5))],
)
async def test_nonsense_from_a_peer_of_each_role_harms_nobody(
    double: Parts, references: References, table: Table, seconds: float, seed: int
) -> None:
    jobs = shuffled(SHORT, 0)
    expected = await references.of(double.server.url, jobs)
    pids = double.pids()
    hostiles = [HostilePeer(double.listen, role, random.Random(seed)) for role in ROLES]

    async def inject_faults() -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for each in hostiles:
                each.talk(10)
            await asyncio.sleep(0.01)

    try:
        outcomes = await Load(double.server.url).run_while(jobs, inject_faults)
    finally:
        for each in hostiles:
            each.close()
    said = [each.said for each in hostiles]
    table.add(f"{sum(said)} messages, {len(outcomes)} requests, {len(failures(outcomes))} failed")
    assert min(said) > 100
    assert failures(outcomes) == []
    OutputCheck(double.server.url, expected).compare(outcomes)
    assert_nothing_is_left(await double.idle())
    assert double.pids() == pids
