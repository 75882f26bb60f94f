"""Split-K: with few outputs, one split of the inputs would leave most of a GPU idle.

Each split of a product is summed by its own programs, in float32, into its own memory. A second kernel adds the splits,
always in the same order, and rounds once, so results are reproducible.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import cdiv, pdl_launch_next, pdl_options, pdl_wait
from tercet.kernels.triton.launch_cache import launch

_SPLITS = 16
_SHORTEST = 1024
"""Minimum inputs of a split: the prologue and epilogue of a program cost as much as some blocks."""

_TRAFFIC = 16
"""Minimum inputs for each row and split: traffic of partial sums is then at most half of an 8-bit weight."""

_BLOCK = 512
_WARPS = 4


@triton.jit
def range_of_split(k, BLOCK_K: tl.constexpr):
    """Return (first, end) of the inputs of this program; its split is the third dimension of the grid.

    Ranges are whole blocks and differ by at most one block; an empty split also begins within the inputs.
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
    PDL: tl.constexpr,
):
    """Add the splits of BLOCK outputs."""
    size = m * n
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = place < size
    total = tl.zeros([BLOCK], tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + place % n, mask=there, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    for split in tl.static_range(SPLITS):
        total += tl.load(parts_ptr + split * size.to(tl.int64) + place, mask=there, other=0.0)
    pdl_launch_next(PDL)
    if bias_ptr is not None:
        total += bias
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=there)


def add_splits(parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Add float32 partial sums [splits, m, n] and a bias [n] into out [m, n]."""
    splits, m, n = parts.shape
    options = {"SPLITS": splits, "BLOCK": _BLOCK, "num_warps": _WARPS}
    launch(add_splits_kernel, (cdiv(m * n, _BLOCK),), (parts, bias, out), (m, n), **options, **pdl_options(out.device))


def splits_for(programs: int, rows: int, k: int, wanted: int) -> int:
    """Return the number of splits of k, a power of two, that gives `wanted` programs; fewer if k is short."""
    splits = 1
    while splits < _SPLITS and programs * splits < wanted and 2 * splits * max(_SHORTEST, _TRAFFIC * rows) <= k:
        splits *= 2
    return splits
