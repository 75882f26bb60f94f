import sys
from collections.abc import Callable

import pytest
import torch

from tercet.scheduler.executor.shortage import again, in_parts

ERRORS = pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])


class Device:
    """Room for some rows at once, and what was asked of it."""

    def __init__(self, room: int, error: type[Exception]) -> None:
        self.room = room
        self.error = error
        self.asked: list[tuple[int, int]] = []
        self.released = 0

    def run(self, rows: slice) -> list[int]:
        self.asked.append((rows.start, rows.stop))
        if rows.stop - rows.start > self.room:
            raise self.error
        return [*range(rows.start, rows.stop)]

    def release(self) -> None:
        assert sys.exception() is None, "an error holds what was computed"
        self.released += 1


@ERRORS
def test_rows_are_computed_at_once_or_in_halves(error: type[Exception]) -> None:
    at_once, halved = Device(7, error), Device(2, error)
    assert in_parts(at_once.run, 3, 10, at_once.release) == [[3, 4, 5, 6, 7, 8, 9]]
    assert (at_once.asked, at_once.released) == ([(3, 10)], 0)
    assert in_parts(halved.run, 3, 10, halved.release) == [[3], [4, 5], [6, 7], [8, 9]]
    assert halved.asked == [(3, 10), (3, 6), (3, 4), (4, 6), (6, 10), (6, 8), (8, 10)]
    assert halved.released == 3


@ERRORS
def test_one_row_is_tried_again_before_it_fails(error: type[Exception]) -> None:
    device = Device(0, error)
    with pytest.raises(error):
        in_parts(device.run, 0, 2, device.release)
    assert (device.asked, device.released) == ([(0, 2), (0, 1), (0, 1)], 2)

    def release() -> None:
        device.room = 1

    device.room = 0
    assert in_parts(device.run, 4, 5, release) == [[4]]


@ERRORS
def test_what_finds_no_memory_is_tried_once_more(error: type[Exception]) -> None:
    device = Device(0, error)

    def release() -> None:
        device.release()
        device.room = device.released - 1

    def run() -> list[int]:
        return device.run(slice(0, 1))

    with pytest.raises(error):
        again(run, release)
    assert again(run, release) == [0]
    assert again(run, release) == [0]
    assert (len(device.asked), device.released) == (5, 2)


def test_other_errors_are_not_for_memory() -> None:
    device = Device(0, RuntimeError)
    calls: list[Callable[[], object]] = [
        lambda: in_parts(device.run, 0, 4, device.release),
        lambda: again(lambda: device.run(slice(0, 4)), device.release),
    ]
    for call in calls:
        with pytest.raises(RuntimeError):
            call()
    assert (device.asked, device.released) == ([(0, 4), (0, 4)], 0)
