"""Pace of refusals: a burst at once, later ones in order, other keys at once, and a bound on those that wait."""

import asyncio

import pytest

from tercet.frontend.http.refusal_pace import RefusalPace

BURST, INTERVAL = 16, 0.02


def test_a_burst_is_refused_at_once_and_later_ones_in_order() -> None:
    pace = RefusalPace(100)
    delays = [pace.delay("a", 1000.0) for _ in range(BURST + 4)]
    assert delays[: BURST + 1] == [0.0] * (BURST + 1)
    assert delays[BURST + 1 :] == pytest.approx([INTERVAL, 2 * INTERVAL, 3 * INTERVAL])


def test_keys_do_not_wait_for_one_another() -> None:
    pace = RefusalPace(100)
    assert max(pace.delay("a", 1000.0) for _ in range(100)) > 1
    assert pace.delay("b", 1000.0) == 0


def test_a_key_that_rests_gets_its_burst_again() -> None:
    pace = RefusalPace(100)
    for _ in range(BURST + 1):
        pace.delay("a", 1000.0)
    later = 1000.0 + (BURST + 1) * INTERVAL
    assert [pace.delay("a", later) for _ in range(BURST + 1)] == [0.0] * (BURST + 1)
    assert pace.delay("a", later) > 0


async def test_no_more_than_a_bound_wait_and_others_are_answered_at_once() -> None:
    pace = RefusalPace(2)
    waits = [asyncio.ensure_future(pace.wait("a")) for _ in range(BURST + 50)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sum(not wait.done() for wait in waits) == 2
    await asyncio.gather(*waits)
    assert pace.delay("a", asyncio.get_running_loop().time() + 60) == 0
