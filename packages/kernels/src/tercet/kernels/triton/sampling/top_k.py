"""Top-k of each row, found without sorting by a radix search over blocks of the vocabulary in parallel.

Top-k keeps a prefix of the tokens ordered by score and id. Two numbers describe it: the *distance* of its last token
below the likeliest, as the bits of a float32, which order like integers, and the number of tokens of exactly that
distance that it keeps, by id.

The logit of that last token is found four bits at a time, as digits of a key that orders logits: every *level* counts,
for each block and each of the sixteen next digits, the tokens whose keys have this prefix. The next launch sums over
blocks and derives the digit. bfloat16 has four such levels, float32 eight. A block is skipped if at least k other
blocks have a larger maximum. A last launch counts the tokens that are nearer than that one and those at the same
distance, after rounding.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.sampling.scores import FARTHEST, NEVER, highest_of, scaled_logits

LEVELS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
"""Number of digits that distinguish all logits of a dtype, as float32."""
DIGITS = tl.constexpr(16)


@triton.jit
def _key(logits):
    """Return uint32 keys; larger logits have smaller keys."""
    bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(key, LEVELS: tl.constexpr):
    """Return the logit whose key begins with the digits of an int64 key."""
    bits = key.to(tl.uint32).to(tl.int32, bitcast=True)
    positive = ((bits ^ 0x7FFFFFFF) >> (32 - 4 * LEVELS)) << (32 - 4 * LEVELS)
    return tl.where(bits < 0, bits, positive).to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(keys_ptr, counts_ptr, wanted, row, rows, blocks, level, BLOCKS: tl.constexpr):
    """Return the first `level` digits of the key of token `wanted`; store them with the number of smaller prefixes."""
    before = (level - 1) * rows + row
    block, digit = tl.arange(0, BLOCKS)[:, None], tl.arange(0, DIGITS)
    at = counts_ptr + (before * blocks + block) * DIGITS + digit[None, :]
    counts = tl.sum(tl.load(at, mask=block < blocks, other=0), 0)
    found = tl.zeros([], tl.int64)
    nearer = tl.zeros([], tl.int64)
    if level > 1:
        found = tl.load(keys_ptr + before * 2)
        nearer = tl.load(keys_ptr + before * 2 + 1)
    step = tl.sum((nearer + tl.cumsum(counts, 0) < wanted).to(tl.int32), 0)
    nearer += tl.sum(tl.where(digit < step, counts, 0), 0)
    found += step.to(tl.int64) << (32 - 4 * level)
    if tl.program_id(1) == 0:
        tl.store(keys_ptr + (level * rows + row) * 2, found)
        tl.store(keys_ptr + (level * rows + row) * 2 + 1, nearer)
    return found


@triton.jit
def _may_hold(bests_ptr, top_k, row, block, blocks, BLOCKS: tl.constexpr):
    """Return whether a block may hold one of the first `top_k`: fewer than that many blocks have a larger maximum."""
    index = tl.arange(0, BLOCKS)
    bests = tl.load(bests_ptr + row * blocks + index, mask=index < blocks, other=NEVER)
    return tl.sum((bests > tl.load(bests_ptr + row * blocks + block)).to(tl.int32), 0) < top_k


@triton.jit(do_not_specialize=["top_k_ptr", "level"])
def level_kernel(
    logits_ptr, top_k_ptr, bests_ptr,
    keys_ptr,  # int64 [LEVELS + 1, rows, 2]: results of `_narrowed`
    counts_ptr,  # int32 [LEVELS + 1, rows, blocks, DIGITS]
    vocab, stride, blocks, level,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the digits of one level of one block of one row."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (tl.abs(highest_of(bests_ptr, row, blocks, BLOCKS)) < float("inf")):
        found = tl.zeros([], tl.int64)
        if level > 0:
            found = _narrowed(keys_ptr, counts_ptr, tl.minimum(top_k, vocab), row, rows, blocks, level, BLOCKS)
        each = tl.arange(0, DIGITS)
        counts = tl.zeros([DIGITS], tl.int32)
        if _may_hold(bests_ptr, top_k, row, block, blocks, BLOCKS):
            token = block * BLOCK + tl.arange(0, BLOCK)
            there = token < vocab
            logits = tl.load(logits_ptr + row * stride + token, mask=there, other=NEVER)
            digits = (_key(logits) - found.to(tl.uint32)) >> (28 - 4 * level).to(tl.uint32)
            if tl.min(digits, 0) < DIGITS:  # otherwise all keys have other prefixes
                mine = (digits[None, :] == each[:, None].to(tl.uint32)) & there[None, :]
                counts = tl.sum(mine.to(tl.int32), 1)
        tl.store(counts_ptr + ((level * rows + row) * blocks + block) * DIGITS + each, counts)


@triton.jit(do_not_specialize=["temperature_ptr", "top_k_ptr"])
def count_ties_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, bests_ptr, keys_ptr, counts_ptr,
    limits_ptr,  # int32 [rows]
    vocab, stride, blocks,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the tokens of one block of one row that are nearer than the last kept one, and those at its distance."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    top_k = tl.load(top_k_ptr + row)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    if (top_k > 0) & (tl.abs(highest) < float("inf")):
        token = block * BLOCK + tl.arange(0, BLOCK)
        there = token < vocab
        logits = tl.load(logits_ptr + row * stride + token, mask=there, other=NEVER)
        found = _narrowed(keys_ptr, counts_ptr, tl.minimum(top_k, vocab), row, rows, blocks, LEVELS, BLOCKS)
        temperature = tl.load(temperature_ptr + row)
        _, limit = scaled_logits(_logit(found, LEVELS), highest, temperature)
        _, distance = scaled_logits(logits, highest, temperature)
        at = counts_ptr + ((LEVELS * rows + row) * blocks + block) * DIGITS
        tl.store(at, tl.sum((there & (distance < limit)).to(tl.int32), 0))
        tl.store(at + 1, tl.sum((there & (distance == limit)).to(tl.int32), 0))
        if block == 0:
            tl.store(limits_ptr + row, limit)


@triton.jit
def top_k_limits(
    top_k_ptr, limits_ptr, counts_ptr, vocab, row, rows, blocks, LEVELS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """Return (the largest kept distance, how many tokens at it are kept, such tokens of each block [BLOCKS])."""
    top_k = tl.load(top_k_ptr + row)
    limit = tl.full([], FARTHEST, tl.int32)
    ties = vocab + tl.zeros([], tl.int32)
    tied = tl.zeros([BLOCKS], tl.int32)
    if top_k > 0:
        block = tl.arange(0, BLOCKS)
        at = counts_ptr + ((LEVELS * rows + row) * blocks + block) * DIGITS
        nearer = tl.sum(tl.load(at, mask=block < blocks, other=0), 0)
        ties = tl.minimum(top_k, vocab).to(tl.int32) - nearer
        tied = tl.load(at + 1, mask=block < blocks, other=0)
        limit = tl.load(limits_ptr + row)
    return limit, ties, tied


def allocate_limits(logits: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate the limits and counts that `find_limits` writes."""
    rows, levels = len(logits), LEVELS[logits.dtype]
    limits = torch.empty(rows, dtype=torch.int32, device=logits.device)
    return limits, torch.empty(levels + 1, rows, blocks, DIGITS.value, dtype=torch.int32, device=logits.device)


def find_limits(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    bests: torch.Tensor,
    found: tuple[torch.Tensor, torch.Tensor],
    shape: tuple[int, int, int],
    options: dict[str, Any],
) -> None:
    """Write the limits and counts of top-k, which `top_k_limits` reads, into `found`.

    `temperature` and `top_k` [rows] are contiguous; `bests` begins with the largest logit of each block [rows, blocks],
    and `shape` is (vocab, stride of a row, blocks).
    """
    (limits, counts), rows, levels, blocks = found, len(logits), LEVELS[logits.dtype], shape[2]
    keys = torch.empty(levels + 1, rows, 2, dtype=torch.int64, device=logits.device)
    for level in range(levels):
        launch(level_kernel, (rows, blocks), (logits, top_k, bests, keys, counts), (*shape, level), **options)
    given = logits, temperature, top_k, bests, keys, counts, limits
    launch(count_ties_kernel, (rows, blocks), given, shape, LEVELS=levels, **options)
