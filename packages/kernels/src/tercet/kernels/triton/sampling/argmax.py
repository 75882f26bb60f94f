"""Argmax and top candidates of each row. The references are in `tercet.kernels.ops.sampling`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import Tiling, cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch

TILINGS = (
    Tiling(8192, 4),
    Tiling(1024, 2),
    Tiling(1024, 4),
    Tiling(2048, 4),
    Tiling(2048, 8),
    Tiling(4096, 4),
    Tiling(4096, 8),
    Tiling(8192, 8),
    Tiling(8192, 16),
    Tiling(16384, 16),
)
"""Tilings by logits of one row. The first is in use."""

_COUNTS = (5, 20)
"""Numbers of candidates that kernels are compiled for, besides powers of two; requests are rounded up to these."""


@triton.jit
def ordered(x):
    """Convert float32 to int32 of the same order: NaN is the largest, and the two zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, token, vocab):
    """Return unique int64 keys: by logit, then by id, where the lowest id is largest."""
    return (ordered(x).to(tl.int64) << 32) + (vocab - 1 - token)


@triton.jit
def token_of(key, vocab):
    """Return the token of a key."""
    return vocab - 1 - (key & 0xFFFFFFFF)


@triton.jit
def _best_of_lanes(logits_at, first, vocab, LANES: tl.constexpr, BLOCK: tl.constexpr):
    """Return (the largest logit of each lane [LANES], its first token); NaN is larger than any number.

    A lane is every LANES-th logit of a block, scanned in order, so that only the best stays in registers.
    """
    token = first + tl.arange(0, LANES)
    best = tl.full([LANES], float("-inf"), tl.float32)
    part_of_best = tl.zeros([LANES], tl.int32)
    for part in tl.static_range(BLOCK // LANES):
        at = token + part * LANES
        logits = tl.load(logits_at + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        better = ~(logits <= best) & (best == best)  # noqa: PLR0124 - NaN stays
        best = tl.where(better, logits, best)
        part_of_best = tl.where(better, part, part_of_best)
    return best, token + part_of_best * LANES


@triton.jit
def best_of_block_kernel(
    logits_ptr, rows_ptr, keys_ptr, vocab, stride,
    COUNT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the COUNT largest keys of one block of one row, in order; missing ones are negative."""
    index = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    row = index
    pdl_wait(PDL)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index)
    logits_at = logits_ptr + row * stride
    if COUNT == 1:
        logits, token = _best_of_lanes(logits_at, first, vocab, LANES, BLOCK)
    else:
        token = first + tl.arange(0, BLOCK)
        logits = tl.load(logits_at + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    pdl_launch_next(PDL)
    nothing = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(token < vocab, key_of(logits, token, vocab), nothing)
    at = keys_ptr + (index * tl.num_programs(1) + tl.program_id(1)) * COUNT
    for place in tl.range(COUNT):
        best = tl.max(keys, 0)
        tl.store(at + place, best)
        keys = tl.where(keys == best, nothing, keys)


@triton.jit
def best_of_row_kernel(
    logits_ptr, keys_ptr, tokens_ptr, values_ptr, vocab, stride, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Store the token of the largest key of all blocks, with its logit; or without, and -1 if that is not finite."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    keys = tl.load(keys_ptr + row * blocks + index, mask=index < blocks, other=-0x7FFFFFFFFFFFFFFF)
    token = token_of(tl.max(keys, 0), vocab)
    logit = tl.load(logits_ptr + row * stride + token)
    if values_ptr is not None:
        tl.store(values_ptr + row, logit)
    else:
        token = tl.where(tl.abs(logit.to(tl.float32)) < float("inf"), token, -1)
    tl.store(tokens_ptr + row, token)


def argmax_with_values(logits: torch.Tensor, *, tiling: Tiling = TILINGS[0]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the largest logit of each row [rows], its token int64 [rows])."""
    values = torch.empty(len(logits), dtype=logits.dtype, device=logits.device)
    return values, _best_of_rows(logits, values, tiling)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens of `argmax_with_values`, -1 where the largest logit is not finite."""
    return _best_of_rows(logits, None, TILINGS[0])


def _best_of_rows(logits: torch.Tensor, values: torch.Tensor | None, tiling: Tiling) -> torch.Tensor:
    rows, vocab = logits.shape
    keys = best_of_blocks(logits, 1, tiling=tiling)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    blocks = keys.shape[1]
    launch(
        best_of_row_kernel,
        (rows,),
        (logits, keys, tokens, values),
        (vocab, logits.stride(0), blocks),
        BLOCK=power_of_two(blocks),
        **pdl_options(logits.device),
    )
    return tokens


def top_candidates(
    logits: torch.Tensor, width: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `width` best tokens as in the reference, of all rows or some.

    `width` is a few tens at most, because the kernel selects them one by one.
    """
    vocab = logits.shape[1]
    count = next((count for count in _COUNTS if width <= count), power_of_two(width))
    keys = best_of_blocks(logits, min(count, TILINGS[0].block), rows).flatten(1)
    best = keys.topk(min(width, vocab), -1).values
    ids = vocab - 1 - (best & 0xFFFFFFFF)
    return (logits.gather(1, ids) if rows is None else logits[rows[:, None], ids]), ids


def best_of_blocks(
    logits: torch.Tensor, count: int, some: torch.Tensor | None = None, *, tiling: Tiling = TILINGS[0]
) -> torch.Tensor:
    """Return the best keys of every block, of all rows or some: int64 [rows, blocks, count]."""
    rows, vocab = len(logits) if some is None else len(some), logits.shape[1]
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    blocks = cdiv(vocab, tiling.block)
    keys = torch.empty(rows, blocks, count, dtype=torch.int64, device=logits.device)
    launch(
        best_of_block_kernel,
        (rows, blocks),
        (logits, some, keys),
        (vocab, logits.stride(0)),
        COUNT=count,
        LANES=min(tiling.block, tiling.warps * 512 // logits.itemsize),
        BLOCK=tiling.block,
        num_warps=tiling.warps,
        **pdl_options(logits.device),
    )
    return keys
