# mypy: disable-error-code="untyped-decorator, no-untyped-def"
"""Kernels that do to memory what no result of an interpreter shows, and what the checker says of them."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

import triton
import triton.language as tl

from tercet.kernels.device import default_device
from tercet.kernels.triton import missing_triton
from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait

pytestmark = pytest.mark.skipif(
    default_device().type == "cuda" or bool(missing_triton(default_device())), reason="a GPU checks nothing"
)


@triton.jit
def shifted_kernel(x_ptr, out_ptr, shift, SIZE: tl.constexpr):  # noqa: N803
    """Writes SIZE numbers, and leaves out `shift` of those that were read."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at + shift))


@triton.jit
def one_place_kernel(out_ptr):
    """Writes the same place, whoever it is."""
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def alike_kernel(x_ptr, out_ptr):
    """Writes the same into the same place, and reads it again."""
    tl.store(x_ptr, 5)
    tl.debug_barrier()
    tl.store(out_ptr + tl.program_id(0), tl.load(x_ptr))


@triton.jit
def counting_kernel(parts_ptr, finished_ptr, out_ptr, COUNTS: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    """The last program to end adds up what all have written; it is known only where programs COUNT."""
    part, programs = tl.program_id(0), tl.num_programs(0)
    tl.store(parts_ptr + part, part + 1)
    tl.debug_barrier()
    last = part == programs - 1
    if COUNTS:
        last = tl.atomic_add(finished_ptr, 1, sem="acq_rel") == programs - 1
    if last:
        at = tl.arange(0, SIZE)
        tl.store(out_ptr, tl.sum(tl.load(parts_ptr + at, mask=at < programs, other=0)))


@triton.jit
def counted_backwards_kernel(x_ptr, out_ptr, BARRIER: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    """Counts, and reads backwards what it has counted."""
    at = tl.arange(0, SIZE)
    tl.store(x_ptr + at, at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out_ptr + at, tl.load(x_ptr + SIZE - 1 - at))


@triton.jit
def turned_kernel(x_ptr, BARRIER: tl.constexpr, SIZE: tl.constexpr):  # noqa: N803
    """Turns numbers around in place."""
    at = tl.arange(0, SIZE)
    x = tl.load(x_ptr + SIZE - 1 - at)
    if BARRIER:
        tl.debug_barrier()
    tl.store(x_ptr + at, x)


@triton.jit
def halved_kernel(x_ptr, SIZE: tl.constexpr):  # noqa: N803
    """Halves even numbers where they are; the odd ones become 0 unread."""
    at = tl.arange(0, SIZE)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at % 2 == 0, other=0) // 2)


@triton.jit
def early_kernel(x_ptr, out_ptr, ORDER: tl.constexpr, PDL: tl.constexpr):  # noqa: N803
    """Waits (w), reads (r), stores (s), and lets the next begin (n), as ORDER says."""
    if ORDER == "wrsn" or ORDER == "wnrs":
        pdl_wait(PDL)
    if ORDER == "wnrs":
        pdl_launch_next(PDL)
    x = tl.load(x_ptr)
    if ORDER == "rwsn":
        pdl_wait(PDL)
    if ORDER == "rnws":
        pdl_launch_next(PDL)
        pdl_wait(PDL)
    if ORDER == "rsw":
        tl.store(out_ptr, x)
        pdl_wait(PDL)
    else:
        tl.store(out_ptr, x)
    if ORDER == "wrsn" or ORDER == "rwsn":
        pdl_launch_next(PDL)


def ints(*shape: int) -> torch.Tensor:
    return torch.arange(shape[0], dtype=torch.int32) if len(shape) == 1 else torch.zeros(shape, dtype=torch.int32)


def run(kernel: Any, programs: int, *args: torch.Tensor | int, **options: object) -> None:
    kernel[(programs,)](*args, **options)


def test_accesses_within_bounds_and_without_races_pass() -> None:
    x = ints(64)
    run(shifted_kernel, 4, x, out := torch.zeros_like(x), 0, SIZE=16)
    assert torch.equal(out, x)
    run(shifted_kernel, 4, x, x, 0, SIZE=16)
    assert torch.equal(out, x)


@pytest.mark.parametrize("shift", [-1, 1, 2**20])
def test_out_of_bounds_accesses_are_reported(shift: int) -> None:
    with pytest.raises(Exception, match="shifted_kernel: a program leaves the memory that it was given"):
        run(shifted_kernel, 4, ints(64), torch.zeros(64, dtype=torch.int32), shift, SIZE=16)


def test_read_write_races_between_programs_are_reported() -> None:
    with pytest.raises(Exception, match="memory is read and written by programs 0 and 1"):
        run(shifted_kernel, 3, x := ints(64), x, 16, SIZE=16)
    run(shifted_kernel, 1, x, x, 16, SIZE=16)


def test_write_races_between_programs_are_reported() -> None:
    run(one_place_kernel, 1, ints(1))
    run(alike_kernel, 3, ints(1), ints(3))
    with pytest.raises(Exception, match="memory is written by programs 0 and 1"):
        run(one_place_kernel, 2, ints(1))


def test_atomics_order_what_lies_around_them() -> None:
    parts, finished, out = torch.zeros(3, 4, dtype=torch.int32)
    run(counting_kernel, 4, parts, finished, out, COUNTS=True, SIZE=4)
    assert int(out[0]) == 10
    with pytest.raises(Exception, match="memory is read and written by programs 0 and 3"):
        run(counting_kernel, 4, parts, finished, out, COUNTS=False, SIZE=4)


def test_in_place_updates_pass() -> None:
    x = ints(8)
    run(halved_kernel, 1, x, SIZE=8)
    assert x.tolist() == [0, 0, 1, 0, 2, 0, 3, 0]


def test_threads_of_one_program_are_not_in_lockstep() -> None:
    x, out = torch.zeros(2, 16, dtype=torch.int32)
    run(counted_backwards_kernel, 1, x, out, BARRIER=True, SIZE=16)
    run(turned_kernel, 1, out, BARRIER=True, SIZE=16)
    assert torch.equal(out, ints(16))
    with pytest.raises(Exception, match="reads what another of its threads may have to write yet"):
        run(counted_backwards_kernel, 1, x, out, BARRIER=False, SIZE=16)
    with pytest.raises(Exception, match="writes what another of its threads may have to read yet"):
        run(turned_kernel, 1, out, BARRIER=False, SIZE=16)


@pytest.mark.parametrize("order", ["wrsn", "wnrs", "rwsn"])
def test_kernels_that_wait_may_use_pdl(order: str) -> None:
    x, out = ints(2), ints(2)
    run(early_kernel, 1, x[1:], out, ORDER=order, PDL=False)
    assert out.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("order", "wrong"),
    [
        ("rs", "writes before the kernel before has ended"),
        ("rsw", "writes before the kernel before has ended"),
        ("rnws", "lets the next kernel begin before it has waited"),
    ],
)
def test_pdl_kernels_wait_before_other_work(order: str, wrong: str) -> None:
    with pytest.raises(Exception, match=wrong):
        run(early_kernel, 1, ints(1), ints(1), ORDER=order, PDL=False)


def test_reads_wait_for_writes_of_the_previous_kernel() -> None:
    x, between, out = torch.ones(3, 1, dtype=torch.int32)
    run(early_kernel, 1, x, between, ORDER="wrsn", PDL=False)
    run(early_kernel, 1, x, out, ORDER="rwsn", PDL=False)
    run(early_kernel, 1, x, between, ORDER="wrsn", PDL=False)
    with pytest.raises(Exception, match="reads what early_kernel writes, without waiting for it"):
        run(early_kernel, 1, between, out, ORDER="rwsn", PDL=False)
