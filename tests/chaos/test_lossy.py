"""Loss of one message in a hundred, on every link and of every kind: requests end as without losses."""

from itertools import pairwise

import pytest

from tests.chaos.conftest import References, Table
from tests.chaos.fault_injection import failures
from tests.chaos.load import FULL, SHORT, Load, quantile, shuffled
from tests.chaos.output_check import OutputCheck
from tests.chaos.parts import Parts, assert_nothing_is_left, watched
from tests.server_process import Server

FEWEST = 3
"""Least number of requests that must have missed a message."""


@pytest.mark.parametrize(
    ("count", "seed"),
    [
        pytest.param(SHORT, 2, id="short"),
        *[
            pytest.param(FULL, seed, id=f"full-{seed}", marks=[pytest.mark.slow, pytest.mark.timeout(7200)])
            for seed in range(10)
        ],
    ],
)
async def test_lost_messages_are_found_and_made_up_for(
    single: Parts, lossy: Server, references: References, table: Table, count: int, seed: int
) -> None:
    jobs = shuffled(count, seed)
    expected = await references.of(single.server.url, jobs)
    with watched(lossy) as parts:
        await parts.ready()
        outcomes = await Load(lossy.url).run(jobs)
        assert failures(outcomes) == []
        verdict = OutputCheck(lossy.url, expected).compare(outcomes)
        missed = await parts.resumed()
        pauses = [max(b - a for a, b in pairwise(each.arrivals)) for each in outcomes if each.arrivals]
        table.add(
            f"{count} requests, 0 failed, {missed} missed something; longest pause of a stream p50 "
            f"{quantile(pauses, 0.5):.2f} s, p99 {quantile(pauses, 0.99):.2f} s; "
            f"{verdict.ties} ties in {verdict.texts} texts"
        )
        assert missed >= FEWEST
        assert verdict.ties <= max(1, verdict.texts // 500)
        assert_nothing_is_left(await parts.idle())
