"""Sums over inputs that are cut into splits: one split of few outputs would leave most of a GPU idle.

Each split of a product is summed by programs of its own, in float32, and its sums lie in memory of their own. A second
kernel adds them up, always in the same order, and rounds once: results are the same every time.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import cdiv, early_start, pdl_launch_next, pdl_wait
from tercet.kernels.triton.launch_cache import launch

_SPLITS = 16
_SHORTEST = 1024
"""Inputs of a split: what a program does before and after its loop takes as long as some blocks."""

_TRAFFIC = 16
"""Inputs for each row and split at least: sums, written and read again, are then at most half of a weight in 8 bits."""

_BLOCK = 512
_WARPS = 4


@triton.jit
def range_of_split(k, BLOCK_K: tl.constexpr):
    """(first, end) of the inputs of this program, whose split is the grid's third dimension: whole blocks.

    They differ by a block at most, and a split that has none begins within the inputs, too.
    """
    split, splits, blocks = tl.program_id(2), tl.num_programs(2), tl.cdiv(k, BLOCK_K)
    first = split * blocks // splits * BLOCK_K
    return first, tl.minimum((split + 1) * blocks // splits * BLOCK_K, k)


@triton.jit(do_not_specialize=["m"])
def add_splits_kernel(
    parts_ptr,  # float32 [SPLITS, m, n]
    bias_ptr,  # [n]
    out_ptr,  # [m, n]
    m,
    n,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK outputs, of whichever rows."""
    size = m * n
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    total = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + place % n, mask=there, other=0.0).to(tl.float32)
    pdl_wait(EARLY)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * size.to(tl.int64) + place, mask=there, other=0.0)
    pdl_launch_next(EARLY)
    if bias_ptr is not None:
        total += bias
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there)


def add_splits(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Of float32 [splits, m, n] the sums, plus a bias [n], into out [m, n]."""
    splits, m, n = parts.shape
    options = {"SPLITS": splits, "BLOCK": _BLOCK, "num_warps": _WARPS}
    launch(add_splits_kernel, (cdiv(m * n, _BLOCK),), (parts, bias, out), (m, n), **options, **early_start(out.device))


def splits_for(programs: int, rows: int, k: int, wanted: int) -> int:
    """Into how many splits, a power of two, k is cut to make `wanted` of so many programs: fewer where it is short."""
    splits = 1
    while splits < _SPLITS and programs * splits < wanted and 2 * splits * max(_SHORTEST, _TRAFFIC * rows) <= k:
        splits *= 2
    return splits
