"""LoRA of a linear layer for all tokens of a step, in two kernels. The reference is `tercet.kernels.ops.lora`.

The first (shrink) computes `low`, x @ a.T, for every token that has an adapter; the second (expand) adds low @ b to the
token's outputs. A program handles one segment, all of one adapter, as a product of 16 rows, or of 64 in steps with
longer segments: those of prompts, whose adapters would otherwise be read from the cache every 16 tokens. Tokens may be
sorted by adapter (`LoRARows.order`), so that the rows of a decode with one adapter are one segment. If segments
are few, inputs are cut into splits, so that several programs read an adapter's `a`; the second kernel sums them in
order, so results are bitwise reproducible. The launch depends only on shapes and the longest segment: an empty segment
adds nothing, regardless of its slot.

Both kernels read the table of segments and the order, like weights, before they wait for the preceding kernel: they are
written before a step.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.lora import FEW_TOKENS, LONGEST_RUN, LoRARows, LoRAWeights
from tercet.kernels.triton.launch import (
    cdiv,
    multiprocessors,
    pdl_launch_next,
    pdl_options,
    pdl_wait,
    power_of_two,
)
from tercet.kernels.triton.launch_cache import launch

_SHORTEST = 256
"""Minimum inputs of a split. This and the following constants are estimates, not measurements."""

_SPLITS = 16
"""Maximum number of splits: every program of the second kernel reads all of them."""

_PROGRAMS = 4
"""Programs of the first kernel on each multiprocessor: one has 32 KiB of loads in flight, which about hides latency."""

_PIECE = 256
"""Bytes of a row that a program of the first kernel reads at a time."""

_LONGEST = 64
"""Maximum ranks of one product."""

_OUTPUTS = 128
"""Outputs of a program of the second kernel, all of one projection."""


@triton.jit
def _run(table_ptr, order_ptr, run, TOKENS: tl.constexpr):
    """Return (slot, whether the segment has tokens, tokens [TOKENS], mask of the tokens that exist)."""
    place = tl.load(table_ptr + run * 3)
    start = tl.load(table_ptr + run * 3 + 1)
    stop = tl.load(table_ptr + run * 3 + 2)
    token = start + tl.arange(0, TOKENS)
    there = token < stop
    if order_ptr is not None:
        token = tl.load(order_ptr + token, mask=there, other=0)
    return place.to(tl.int64), start < stop, token.to(tl.int64), there


@triton.jit
def _dot(x, weight, acc):
    """Return acc + x @ weight, with float32 precision if either operand is float32."""
    if x.dtype != weight.dtype:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    return tl.dot(x, weight, acc, input_precision="tf32x3")


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["table_ptr", "order_ptr"])
def lora_shrink_kernel(
    x_ptr,  # [tokens, inputs]
    a_ptr,  # [slots, RANKS, inputs]
    table_ptr,  # int32 [segments, 3]
    order_ptr,  # int32 [tokens], the tokens that segments count, or None
    low_ptr,  # float32 [segments, splits, TOKENS, RANKS]
    inputs,
    blocks,  # number of blocks of BLOCK_K inputs in a split
    stride_x,
    RANKS: tl.constexpr,  # of all projections
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_R columns of x @ a.T for one segment and one split of the inputs.

    Every program waits for the preceding kernel, also for an empty segment: the kernels after these two rely on it.
    """
    run, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    place, any_token, token, token_there = _run(table_ptr, order_ptr, run, TOKENS)
    rank = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rank_there = rank < RANKS
    first = split * blocks * BLOCK_K
    last = tl.where(any_token, tl.minimum(first + blocks * BLOCK_K, inputs), 0)
    column = first + tl.arange(0, BLOCK_K)
    inside = (column < inputs) & any_token
    x_at = x_ptr + token[:, None] * stride_x
    a_at = a_ptr + (place * RANKS + rank)[None, :] * inputs
    a = tl.load(a_at + column[:, None], mask=inside[:, None] & rank_there[None, :], other=0.0)
    pdl_wait(PDL)
    x = tl.load(x_at + column[None, :], mask=token_there[:, None] & inside[None, :], other=0.0)
    low = _dot(x, a, tl.zeros([TOKENS, BLOCK_R], tl.float32))
    for begin in tl.range(first + BLOCK_K, last, BLOCK_K):
        column = begin + tl.arange(0, BLOCK_K)
        inside = column < inputs
        a = tl.load(a_at + column[:, None], mask=inside[:, None] & rank_there[None, :], other=0.0)
        x = tl.load(x_at + column[None, :], mask=token_there[:, None] & inside[None, :], other=0.0)
        low = _dot(x, a, low)
    pdl_launch_next(PDL)
    row = (run * tl.num_programs(2) + split) * TOKENS + tl.arange(0, TOKENS)
    tl.store(low_ptr + row[:, None] * RANKS + rank[None, :], low, mask=token_there[:, None] & rank_there[None, :])


@triton.jit
def _projection(block, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return (projection, first output, end) of a block; no block has outputs of two projections."""
    part = 0
    start = 0
    end = 0
    blocks = 0  # of all preceding projections
    outputs = 0
    for index in tl.static_range(len(PARTS)):
        here = block >= blocks
        part = tl.where(here, index, part)
        start = tl.where(here, outputs + (block - blocks) * BLOCK_N, start)
        end = tl.where(here, outputs + PARTS[index], end)
        blocks += (PARTS[index] + BLOCK_N - 1) // BLOCK_N
        outputs += PARTS[index]
    return part, start, end


@triton.jit
def _low(at, rank, token_there, splits, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Return the sum of all splits: float32 [TOKENS, ranks]."""
    TOKENS: tl.constexpr = token_there.shape[0]
    at += tl.arange(0, TOKENS)[:, None] * RANKS + rank[None, :]
    there = token_there[:, None] & (rank < RANK)[None, :]
    low = tl.load(at, mask=there, other=0.0)
    for _ in tl.range(1, splits):
        at += TOKENS * RANKS
        low += tl.load(at, mask=there, other=0.0)
    return low


@triton.jit
def _add_product(low, b, added, out_dtype: tl.constexpr):
    """Return added + low @ b, more exact than outputs are rounded: in 16 bits, two of the three products of float32."""
    if (b.dtype == tl.float32) | (b.dtype != out_dtype):
        return _dot(low, b, added)
    high = low.to(b.dtype)
    rest = (low - high.to(tl.float32)).to(b.dtype)
    return tl.dot(high, b, tl.dot(rest, b, added))


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["table_ptr", "order_ptr"])
def lora_expand_kernel(
    low_ptr,  # float32 [segments, splits, TOKENS, RANK * projections]
    b_ptr,  # [slots, RANK, outputs]
    table_ptr,  # int32 [segments, 3]
    order_ptr,  # int32 [tokens], the tokens that segments count, or None
    out_ptr,  # [tokens, outputs]
    outputs,
    splits,
    stride_out,
    PARTS: tl.constexpr,  # outputs of each projection
    RANK: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add low @ b of one segment to BLOCK_N outputs of one projection."""
    RANKS: tl.constexpr = RANK * len(PARTS)
    run = tl.program_id(1).to(tl.int64)
    place, any_token, token, token_there = _run(table_ptr, order_ptr, run, TOKENS)
    part, start, end = _projection(tl.program_id(0), PARTS, BLOCK_N)
    output = start + tl.arange(0, BLOCK_N)
    n_there = (output < end) & any_token
    rank = tl.arange(0, BLOCK_R)
    b_at = b_ptr + place * RANK * outputs + output[None, :]
    b = tl.load(b_at + rank[:, None] * outputs, mask=(rank < RANK)[:, None] & n_there[None, :], other=0.0)
    pdl_wait(PDL)
    there = token_there[:, None] & n_there[None, :]
    out_at = out_ptr + token[:, None] * stride_out + output[None, :]
    before = tl.load(out_at, mask=there, other=0.0).to(tl.float32)
    low_at = low_ptr + run * splits * TOKENS * RANKS + part * RANK
    low = _low(low_at, rank, token_there, splits, RANK, RANKS)
    added = _add_product(low, b, tl.zeros([TOKENS, BLOCK_N], tl.float32), out_ptr.dtype.element_ty)
    for first in tl.range(BLOCK_R, RANK, BLOCK_R):
        more = first + rank
        b = tl.load(b_at + more[:, None] * outputs, mask=(more < RANK)[:, None] & n_there[None, :], other=0.0)
        low = _low(low_at, more, token_there, splits, RANK, RANKS)
        added = _add_product(low, b, added, out_ptr.dtype.element_ty)
    pdl_launch_next(PDL)
    tl.store(out_at, (before + added).to(out_ptr.dtype.element_ty), mask=there)


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, rows: LoRARows) -> None:
    """Apply adapters as in the reference, from `rows.table` only. Rows of `out` and `x` may be strided."""
    if not weights.a.is_contiguous() or not weights.b.is_contiguous() or x.stride(1) != 1 or out.stride(1) != 1:
        raise ValueError("adapters need contiguous weights, and rows of contiguous inputs and outputs")
    runs, inputs = len(rows.table), x.shape[1]
    if not runs:
        return
    few = rows.longest <= FEW_TOKENS
    tokens, ranks = FEW_TOKENS if few else LONGEST_RUN, weights.a.shape[1]
    block_r = _ranks_of_a_product(ranks)
    block_k = (_PIECE if few else _PIECE // 2) // max(x.element_size(), weights.a.element_size())
    splits, blocks = _splits(inputs, cdiv(ranks, block_r) * runs, block_k, x.device)
    low = torch.empty(runs, splits, tokens, ranks, dtype=torch.float32, device=x.device)
    launch(
        lora_shrink_kernel,
        (cdiv(ranks, block_r), runs, splits),
        (x, weights.a, rows.table, rows.order, low),
        (inputs, blocks, x.stride(0)),
        RANKS=ranks,
        TOKENS=tokens,
        BLOCK_R=block_r,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=3,
        **pdl_options(x.device),
    )
    expand(out, low, weights, rows)


def expand(out: torch.Tensor, low: torch.Tensor, weights: LoRAWeights, rows: LoRARows) -> None:
    """Add low @ b to the outputs, for the sum of low [segments, splits, tokens, ranks] over its splits."""
    runs, splits, tokens, _ = low.shape
    launch(
        lora_expand_kernel,
        (sum(cdiv(part, _OUTPUTS) for part in weights.parts), runs),
        (low, weights.b, rows.table, rows.order, out),
        (weights.b.shape[2], splits, out.stride(0)),
        PARTS=weights.parts,
        RANK=weights.rank,
        TOKENS=tokens,
        BLOCK_R=_ranks_of_a_product(weights.rank),
        BLOCK_N=_OUTPUTS,
        num_warps=4 if tokens == FEW_TOKENS else 8,
        **pdl_options(out.device),
    )


def _ranks_of_a_product(ranks: int) -> int:
    """Return the block size of ranks; a tensor core takes at least 16."""
    return min(_LONGEST, max(16, power_of_two(ranks)))


def _splits(inputs: int, programs: int, block: int, device: torch.device) -> tuple[int, int]:
    """Return (splits, blocks of each) that keep a device busy with `programs` programs for each split."""
    most = max(1, min(_PROGRAMS * multiprocessors(device) // programs, inputs // _SHORTEST, _SPLITS))
    blocks = cdiv(cdiv(inputs, most), block)
    return cdiv(inputs, blocks * block), blocks
