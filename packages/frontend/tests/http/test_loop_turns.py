"""Long work on the event loop: one turn at a time, rotation between keys, and rests in between."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tercet.frontend.http.loop_turns import MOST_PLACES, SLICE_SECONDS, LoopPlaces, LoopTurns, Steps


class Clock:
    """A clock that moves only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def work(clock: Clock, steps: int, seconds: float, result: str = "") -> Steps[str]:
    for _ in range(steps):
        clock.now += seconds
        yield
    return result


async def test_keys_take_turns(clock: Clock) -> None:
    turns, order = LoopTurns(clock), []

    async def ask(owner: str) -> None:
        await turns.turn(owner)
        order.append(owner)

    await asyncio.gather(*(ask(owner) for owner in "aaaabc"))
    assert "".join(order) == "aabcaa"


async def test_short_work_waits_for_no_turn(clock: Clock) -> None:
    turns = LoopTurns(clock)
    await turns.turn("other")
    waiting = asyncio.ensure_future(turns.turn("other"))
    await asyncio.sleep(0)
    assert await turns.run("mine", work(clock, 3, SLICE_SECONDS / 4, "done")) == "done"
    assert not waiting.done()
    waiting.cancel()


async def test_between_slices_the_loop_serves_others(clock: Clock) -> None:
    turns, slices = LoopTurns(clock), []
    longest, before = 0.0, clock.now

    def watch() -> None:
        nonlocal longest, before
        longest, before = max(longest, clock.now - before), clock.now
        slices.append(clock.now)
        loop.call_soon(watch)

    loop = asyncio.get_running_loop()
    loop.call_soon(watch)
    await turns.run("a", work(clock, 100, SLICE_SECONDS / 2))
    assert longest <= 2 * SLICE_SECONDS
    assert clock.now == pytest.approx(50 * SLICE_SECONDS)


async def test_two_long_works_never_share_a_turn_of_the_loop(clock: Clock) -> None:
    """Many long tasks block the loop no longer than one does."""
    turns = LoopTurns(clock)
    longest, before = 0.0, clock.now

    def watch() -> None:
        nonlocal longest, before
        longest, before = max(longest, clock.now - before), clock.now
        loop.call_soon(watch)

    works = [asyncio.ensure_future(turns.run(str(key), work(clock, 40, SLICE_SECONDS))) for key in range(8)]
    await asyncio.sleep(0)  # each has done its first slice
    loop, before = asyncio.get_running_loop(), clock.now
    loop.call_soon(watch)
    await asyncio.gather(*works)
    assert longest <= 2 * SLICE_SECONDS


@pytest.mark.parametrize(("seconds", "rest"), [(0.002, 0.002), (0.01, 0.2)], ids=["short", "long"])
async def test_after_a_turn_the_loop_is_left_alone(clock: Clock, seconds: float, rest: float) -> None:
    turns = LoopTurns(clock)
    await turns.turn("a")
    clock.now += seconds
    started = time.monotonic()
    await turns.turn("a")
    assert time.monotonic() - started >= 0.9 * rest


@pytest.mark.parametrize("given", [False, True], ids=["while it waits", "when its turn has come"])
async def test_who_is_cancelled_leaves_the_turn_to_others(clock: Clock, given: bool) -> None:
    turns = LoopTurns(clock)
    await turns.turn("a")
    gone, stays = asyncio.ensure_future(turns.turn("a")), asyncio.ensure_future(turns.turn("a"))
    await asyncio.sleep(0)
    if given:
        turns._give_next()
    gone.cancel()
    with suppress(asyncio.CancelledError):
        await gone
    async with asyncio.timeout(5):
        await stays
    assert not turns.waiting


async def test_an_error_of_the_work_is_the_callers(clock: Clock) -> None:
    def fails() -> Iterator[None]:
        yield
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await LoopTurns(clock).run("a", fails())  # type: ignore[arg-type]


async def test_few_requests_start_in_one_iteration_of_the_loop() -> None:
    """A key with one request starts it among the next, however many another has."""
    starts = LoopPlaces()
    started: list[tuple[int, str]] = []
    now = 0

    def count() -> None:
        nonlocal now
        now += 1
        if len(started) < 42:
            asyncio.get_running_loop().call_soon(count)

    async def start(owner: str) -> None:
        await starts.wait(owner)
        started.append((now, owner))

    for _ in range(2):  # the second time all places are free again
        started.clear()
        count()
        await asyncio.gather(*(start(owner) for owner in "a" * 40 + "bc"))
        assert max(Counter(iteration for iteration, _ in started).values()) == MOST_PLACES
        owners = [owner for _, owner in started]
        assert {"b", "c"} <= {*owners[: 2 * MOST_PLACES]}


async def test_a_request_that_is_cancelled_while_it_waits_keeps_no_place() -> None:
    starts = LoopPlaces()
    waiting = [asyncio.ensure_future(starts.wait("a")) for _ in range(3 * MOST_PLACES)]
    await asyncio.sleep(0)
    for task in waiting[MOST_PLACES:]:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(5):
        await asyncio.gather(*(starts.wait("b") for _ in range(3 * MOST_PLACES)))
