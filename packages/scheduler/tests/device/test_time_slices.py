"""A long call runs only in its slices of time."""

import threading
from collections.abc import Iterator

import pytest

from tercet.scheduler.device.time_slices import TimeSlices, pause


class Clock:
    """A clock that moves only when work is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slices(clock: Clock) -> Iterator[TimeSlices]:
    made = TimeSlices(clock)
    yield made
    made.close()


def test_a_call_runs_in_slices(slices: TimeSlices, clock: Clock) -> None:
    parts: list[float] = []

    def work() -> None:
        for _ in range(10):
            clock.now += 1
            parts.append(clock.now)
            pause()

    done, counts = False, []
    while not done:
        before = len(parts)
        done = slices.run(work, 3)
        counts.append(len(parts) - before)
        clock.now += 100  # a step of others
    assert counts == [3, 3, 3, 1]


def test_a_short_call_ends_in_one_slice(slices: TimeSlices) -> None:
    done: list[int] = []
    for number in range(3):
        assert slices.run(lambda number=number: done.append(number), 1)  # type: ignore[misc]
    assert done == [0, 1, 2]


def test_the_error_of_a_call_is_raised_and_another_may_follow(slices: TimeSlices) -> None:
    def fails() -> None:
        pause()
        raise MemoryError("none left")

    assert not slices.run(fails, 0)
    with pytest.raises(MemoryError, match="none left"):
        slices.run(fails, 0)
    assert slices.run(lambda: None, 1)


def test_a_cancelled_call_goes_no_further(slices: TimeSlices) -> None:
    steps: list[str] = []

    def work() -> None:
        try:
            steps.append("begun")
            pause()
            steps.append("resumed")
        finally:
            steps.append("ended")

    slices.cancel()
    assert not slices.run(work, 0)
    slices.cancel()
    assert steps == ["begun", "ended"]
    assert slices.run(lambda: None, 1)


def test_other_threads_do_not_pause() -> None:
    pause()


def test_closing_ends_the_thread(clock: Clock) -> None:
    before = threading.active_count()
    slices = TimeSlices(clock)
    assert not slices.run(pause, 0)
    assert threading.active_count() == before + 1
    slices.close()
    assert threading.active_count() == before
