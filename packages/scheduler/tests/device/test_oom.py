import logging
import sys
from collections.abc import Callable

import pytest
import torch

from tercet.scheduler.device.oom import NoSplit, SplitOnOom, SuppressOom, again, lacks_memory, require_memory

CPU_WORDS = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8"
SHORTAGES: list[Exception] = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    MemoryError(),
    RuntimeError(CPU_WORDS),
]
ERRORS = pytest.mark.parametrize("error", SHORTAGES, ids=["accelerator", "native", "cpu"])


class Device:
    """Room for some rows at once, and what was asked of it."""

    def __init__(self, room: int, error: Exception) -> None:
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

    def taken(self) -> list[tuple[int, int]]:
        """What was asked since the last time."""
        asked, self.asked = self.asked, []
        return asked


@pytest.mark.parametrize(
    "error",
    [
        *SHORTAGES,
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_whatever_says_that_there_was_no_memory_is_known(error: Exception) -> None:
    assert lacks_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        ValueError("std::bad_alloc"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_known_for_others(error: BaseException) -> None:
    assert not lacks_memory(error)
    with pytest.raises(type(error)), SuppressOom():
        raise error


def test_what_torch_says_on_this_machine_is_known() -> None:
    went_on = False
    with SuppressOom():
        torch.empty(1 << 50, dtype=torch.uint8)  # more than any address space has
        went_on = True
    assert not went_on


@ERRORS
def test_rows_are_computed_at_once_or_in_halves(error: Exception) -> None:
    at_once, halved = Device(7, error), Device(4, error)
    assert SplitOnOom("rows", at_once.release)(at_once.run, slice(3, 10)) == [[3, 4, 5, 6, 7, 8, 9]]
    assert (at_once.asked, at_once.released) == ([(3, 10)], 0)
    assert SplitOnOom("rows", halved.release)(halved.run, slice(3, 10)) == [[3, 4, 5], [6, 7], [8, 9]]
    assert halved.asked == [(3, 10), (3, 10), (3, 6), (6, 8), (8, 10)]
    assert halved.released == 2


@ERRORS
def test_rows_are_halved_down_to_one_which_fails(error: Exception) -> None:
    device = Device(1, error)
    assert SplitOnOom("rows", device.release)(device.run, slice(0, 4)) == [[0], [1], [2], [3]]
    device = Device(0, error)
    with pytest.raises(type(error)):
        SplitOnOom("rows", device.release)(device.run, slice(0, 2))
    assert (device.asked, device.released) == ([(0, 2), (0, 2), (0, 1), (0, 1)], 3)


def test_rows_that_find_memory_once_it_was_given_back_are_not_halved() -> None:
    device = Device(0, MemoryError())

    def release() -> None:
        device.room = 9

    halving = SplitOnOom("rows", release)
    for rows in (slice(4, 5), slice(0, 9)):
        device.room = 0
        assert halving(device.run, rows) == [[*range(rows.start, rows.stop)]]
    assert device.asked == [(4, 5), (4, 5), (0, 9), (0, 9)]


def test_a_size_that_failed_is_halved_at_once_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(4, MemoryError())
    halving = SplitOnOom("rows", device.release, retry_after=5)
    with caplog.at_level(logging.WARNING):
        halving(device.run, slice(0, 8))
    assert caplog.messages[-1] == "out of memory for 8 rows at once, splitting into at most 4 for a while"
    assert device.taken() == [(0, 8), (0, 8), (0, 4), (4, 8)]
    device.room = 8
    halving(device.run, slice(0, 8))
    halving(device.run, slice(0, 3))
    assert device.taken() == [(0, 4), (4, 8), (0, 3)]
    halving(device.run, slice(0, 8))
    assert device.taken() == [(0, 8)]


def test_a_row_is_computed_however_large_it_is() -> None:
    """Rows of 1, 2, 4, 8 and 40 units, where there is room for 3 rows at once."""
    sizes = [1, 2, 4, 8, 40]
    device = Device(3, MemoryError())
    halving = SplitOnOom("units", device.release)
    assert halving(device.run, slice(0, 5), lambda rows: sum(sizes[rows])) == [[0, 1], [2], [3], [4]]
    assert device.taken() == [(0, 5), (0, 5), (0, 2), (2, 3), (3, 4), (4, 5)]


@ERRORS
def test_what_finds_no_memory_is_tried_once_more(error: Exception) -> None:
    device = Device(0, error)

    def release() -> None:
        device.release()
        device.room = device.released - 1

    def run() -> list[int]:
        return device.run(slice(0, 1))

    with pytest.raises(type(error)):
        again(run, release)
    assert again(run, release) == [0]
    assert again(run, release) == [0]
    assert (len(device.asked), device.released) == (5, 2)


def test_other_errors_are_not_for_memory() -> None:
    device = Device(0, RuntimeError("shapes"))
    calls: list[Callable[[], object]] = [
        lambda: SplitOnOom("rows", device.release)(device.run, slice(0, 4)),
        lambda: again(lambda: device.run(slice(0, 4)), device.release),
    ]
    for call in calls:
        with pytest.raises(RuntimeError):
            call()
    assert (device.asked, device.released) == ([(0, 4), (0, 4)], 0)


@ERRORS
def test_what_is_not_divided_is_tried_once(error: Exception) -> None:
    device = Device(4, error)
    oom_policy = NoSplit()
    assert oom_policy(device.run, slice(2, 6)) == [[2, 3, 4, 5]]
    with pytest.raises(type(error)):
        oom_policy(device.run, slice(0, 5), lambda rows: rows.stop)
    assert device.taken() == [(2, 6), (0, 5)]
    assert not device.released


@ERRORS
def test_what_nothing_is_served_without_is_missed_in_a_line(error: Exception) -> None:
    with (
        pytest.raises(ValueError, match=r"^no memory for the model's weights: "),
        require_memory("the model's weights"),
    ):
        raise error


def test_a_shortage_is_told_without_what_torch_says_of_its_allocator() -> None:
    said = "CUDA out of memory. GPU 0 has 3 MiB free. Process 7 has 9 GiB."
    whole = f"{said} Of the allocated memory 5 GiB is allocated by PyTorch, and so on.\nMore."
    with pytest.raises(ValueError) as caught, require_memory("a cache"):  # noqa: PT011 - its whole text is below
        raise torch.OutOfMemoryError(whole)
    assert str(caught.value) == f"no memory for a cache: {said}"


def test_what_is_no_shortage_passes_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^illegal$"), require_memory("a cache"):
        raise RuntimeError("illegal")
