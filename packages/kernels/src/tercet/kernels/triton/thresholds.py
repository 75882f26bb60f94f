"""What top-k and top-p keep of each row, found without sorting: blocks of the vocabulary are looked at side by side.

Each filter keeps a beginning of the tokens ordered by score and id. So two numbers say what it keeps: the *distance* of
its last token below the likeliest, as the bits of a float32, which order as integers do, and how many tokens of just
that distance it keeps, by id.

The logit of that last token is found four bits at a time, as digits of a key that orders logits: every *level* adds up,
for each block and each of the sixteen next digits, how many tokens have a key that begins so, or their probability.
The launch after it adds up the blocks and knows the digit. bfloat16 has four such levels, float32 eight.
Then a launch *settles* what lies nearer than that token and what is as far: as far as rounding makes them, by distance.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.sampling import Filters
from tercet.kernels.triton.launch import await_previous, release_next

LEVELS = {torch.bfloat16: 4, torch.float16: 5, torch.float32: 8}
"""Digits that tell all logits of a type apart, once they are float32."""
DIGITS = tl.constexpr(16)
COLDEST = tl.constexpr(1e-30)
NEVER = tl.constexpr(float("-inf"))
FARTHEST = tl.constexpr(0x7F800000)
"""The bits of infinity: what is as far as this below the likeliest has no chance."""


@triton.jit
def highest_of(bests_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The largest logit of a row, from those of its blocks."""
    index = tl.arange(0, BLOCKS)
    return tl.max(tl.load(bests_ptr + row * blocks + index, mask=index < blocks, other=NEVER), 0)


@triton.jit
def scaled_logits(logits, highest, temperature):
    """Scores of at most 0, and their distances from it."""
    scaled = tl.div_rn(logits.to(tl.float32) - highest, tl.maximum(temperature, COLDEST))
    return scaled, (0.0 - scaled).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _key(logits):
    """uint32: the larger a logit, the smaller its key."""
    bits = logits.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits, bits ^ 0x7FFFFFFF).to(tl.uint32, bitcast=True)


@triton.jit
def _logit(key, LEVELS: tl.constexpr):
    """The logit whose key begins with the digits of this one, an int64."""
    bits = key.to(tl.uint32).to(tl.int32, bitcast=True)
    positive = ((bits ^ 0x7FFFFFFF) >> (32 - 4 * LEVELS)) << (32 - 4 * LEVELS)
    return tl.where(bits < 0, bits, positive).to(tl.float32, bitcast=True)


@triton.jit
def _narrowed(
    states_ptr, sums_ptr, top_k, top_p, vocab, row, rows, blocks, level,
    BY_MASS: tl.constexpr, LEVELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """(the first `level` digits of the key, the amount of what lies nearer, the amount wanted), stored as a state."""
    slot = level + (LEVELS + 1 if BY_MASS else 0)
    before = (slot - 1) * rows + row
    block, digit = tl.arange(0, BLOCKS)[:, None], tl.arange(0, DIGITS)
    at = sums_ptr + (before * blocks + block) * DIGITS + digit[None, :]
    sums = tl.sum(tl.load(at, mask=block < blocks, other=0.0).to(tl.float64), 0)
    found = tl.zeros([], tl.int64)
    nearer = tl.zeros([], tl.float64)
    wanted = tl.minimum(top_k, vocab).to(tl.float64)
    if level > 1:
        found = tl.load(states_ptr + before * 4).to(tl.int64)
        nearer = tl.load(states_ptr + before * 4 + 1)
        wanted = tl.load(states_ptr + before * 4 + 2)
    elif BY_MASS:
        total = tl.sum(sums, 0)
        if top_k > 0:
            _, _, total, _ = _within_top_k(states_ptr, sums_ptr, top_k, vocab, row, rows, blocks, LEVELS, BLOCKS)
        wanted = top_p.to(tl.float64) * total
    step = tl.sum((nearer + tl.cumsum(sums, 0) < wanted).to(tl.int32), 0)
    step = tl.minimum(step, tl.max(tl.where(sums > 0, digit, 0), 0))  # however sums are rounded,
    step = tl.maximum(step, tl.min(tl.where(sums > 0, digit, DIGITS - 1), 0))  # there is such a token
    nearer += tl.sum(tl.where(digit < step, sums, 0.0), 0)
    found += step.to(tl.int64) << (32 - 4 * level)
    if tl.program_id(1) == 0:
        state_at = states_ptr + (slot * rows + row) * 4
        tl.store(state_at, found.to(tl.float64))
        tl.store(state_at + 1, nearer)
        tl.store(state_at + 2, wanted)
    return found, nearer, wanted


@triton.jit(do_not_specialize=["temperature_ptr", "top_k_ptr", "top_p_ptr", "level"])
def level_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, bests_ptr,
    states_ptr,  # float64 [slots, rows, 4]; a slot is a level, or what was settled: of top-k, then of top-p
    sums_ptr,  # float32 [slots, rows, blocks, DIGITS]
    vocab, stride, blocks, level,
    BY_MASS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The sums of one level of one block of one row."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    await_previous(EARLY)
    release_next(EARLY)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    if (top_p < 1 if BY_MASS else top_k > 0) & (tl.abs(highest) < float("inf")):
        token = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER).to(tl.float32)
        found = tl.zeros([], tl.int64)
        if level > 0:
            found, _, _ = _narrowed(
                states_ptr, sums_ptr, top_k, top_p, vocab, row, rows, blocks, level, BY_MASS, LEVELS, BLOCKS
            )
        digits = (_key(logits) - found.to(tl.uint32)) >> (28 - 4 * level).to(tl.uint32)
        each = tl.arange(0, DIGITS)
        sums = tl.zeros([DIGITS], tl.float32)
        if tl.min(digits, 0) < DIGITS:  # else keys begin otherwise
            amount = tl.where(token < vocab, 1.0, 0.0)
            if BY_MASS:
                scaled, _ = scaled_logits(logits, highest, tl.load(temperature_ptr + row))
                amount = tl.exp(scaled)
            mine = digits[None, :] == each[:, None].to(tl.uint32)
            sums = tl.sum(tl.where(mine, amount[None, :], 0.0), 1)
        slot = level + (LEVELS + 1 if BY_MASS else 0)
        tl.store(sums_ptr + ((slot * rows + row) * blocks + block) * DIGITS + each, sums)


@triton.jit(do_not_specialize=["temperature_ptr", "top_k_ptr", "top_p_ptr"])
def settle_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, bests_ptr, states_ptr, sums_ptr, vocab, stride, blocks,
    BY_MASS: tl.constexpr, LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one block of one row: how many tokens lie nearer than the limit, their mass, how many are just as far."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    await_previous(EARLY)
    release_next(EARLY)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    if (top_p < 1 if BY_MASS else top_k > 0) & (tl.abs(highest) < float("inf")):
        token = block * BLOCK + tl.arange(0, BLOCK)
        there = token < vocab
        logits = tl.load(logits_ptr + row * stride + token, mask=there, other=NEVER)
        found, _, _ = _narrowed(
            states_ptr, sums_ptr, top_k, top_p, vocab, row, rows, blocks, LEVELS, BY_MASS, LEVELS, BLOCKS
        )
        temperature = tl.load(temperature_ptr + row)
        _, limit = scaled_logits(_logit(found, LEVELS), highest, temperature)
        scaled, distance = scaled_logits(logits, highest, temperature)
        slot = LEVELS + (LEVELS + 1 if BY_MASS else 0)
        at = sums_ptr + ((slot * rows + row) * blocks + block) * DIGITS
        tl.store(at, tl.sum(tl.where(there & (distance < limit), 1.0, 0.0), 0))
        tl.store(at + 1, tl.sum(tl.where(distance < limit, tl.exp(scaled), 0.0), 0))
        tl.store(at + 2, tl.sum(tl.where(there & (distance == limit), 1.0, 0.0), 0))
        if block == 0:
            tl.store(states_ptr + (slot * rows + row) * 4 + 3, limit.to(tl.float64))


@triton.jit
def _settled(states_ptr, sums_ptr, slot, row, rows, blocks, BLOCKS: tl.constexpr):
    """(the limit, the amount wanted, how many lie nearer, their mass, how many of each block are as far [BLOCKS])."""
    state_at = states_ptr + (slot * rows + row) * 4
    block = tl.arange(0, BLOCKS)
    at = sums_ptr + ((slot * rows + row) * blocks + block) * DIGITS
    count = tl.sum(tl.load(at, mask=block < blocks, other=0.0).to(tl.float64), 0)
    mass = tl.sum(tl.load(at + 1, mask=block < blocks, other=0.0).to(tl.float64), 0)
    tied = tl.load(at + 2, mask=block < blocks, other=0.0).to(tl.int32)
    return tl.load(state_at + 3).to(tl.int32), tl.load(state_at + 2), count, mass, tied


@triton.jit
def _mass_of(distance):
    """The mass of a token this far from the likeliest, which has 1."""
    return tl.exp(-distance.to(tl.float32, bitcast=True)).to(tl.float64)


@triton.jit
def _within_top_k(
    states_ptr, sums_ptr, top_k, vocab, row, rows, blocks, LEVELS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """(the largest distance that top-k keeps, how many just as far, the mass of all it keeps, ties of each block)."""
    limit, _, count, mass, tied = _settled(states_ptr, sums_ptr, LEVELS, row, rows, blocks, BLOCKS)
    ties = tl.minimum(top_k, vocab).to(tl.float64) - count
    return limit, ties.to(tl.int32), mass + ties * _mass_of(limit), tied


@triton.jit
def kept(
    states_ptr, sums_ptr, top_k, top_p, vocab, row, rows, blocks, LEVELS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    """(the largest distance that top-k and top-p keep, how many just as far, such tokens of each block [BLOCKS])."""
    limit = tl.full([], FARTHEST, tl.int32)
    ties = vocab + tl.zeros([], tl.int32)
    tied = tl.zeros([BLOCKS], tl.int32)
    if top_k > 0:
        limit, ties, _, tied = _within_top_k(states_ptr, sums_ptr, top_k, vocab, row, rows, blocks, LEVELS, BLOCKS)
    if top_p < 1:
        found, wanted, _, nearer, as_far = _settled(states_ptr, sums_ptr, 2 * LEVELS + 1, row, rows, blocks, BLOCKS)
        count = tl.maximum(tl.ceil((wanted - nearer) / _mass_of(found)), 1.0)
        some = tl.minimum(count, vocab.to(tl.float64)).to(tl.int32)
        ties = tl.where(found < limit, some, tl.where(found == limit, tl.minimum(some, ties), ties))
        tied = tl.where(found < limit, as_far, tied)
        limit = tl.minimum(found, limit)
    return limit, ties, tied


def find(
    logits: torch.Tensor,
    params: Sequence[torch.Tensor | None],
    filters: Filters,
    bests: torch.Tensor,
    options: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states and sums from which `kept` knows what filters keep.

    `params` begins with temperature, top-k and top-p of each row, contiguous; `bests` with the largest logit of blocks.
    """
    rows, vocab = logits.shape
    blocks, levels = bests.shape[2], LEVELS[logits.dtype]
    slots = 2 * levels + 2 if filters.any_top_p else levels + 1
    states = torch.empty(slots, rows, 4, dtype=torch.float64, device=logits.device)
    sums = torch.empty(slots, rows, blocks, DIGITS.value, device=logits.device)
    given = logits, *params[:3], bests, states, sums, vocab, logits.stride(0), blocks
    for by_mass, wanted in ((False, filters.any_top_k), (True, filters.any_top_p)):
        for level in range(levels if wanted else 0):
            level_kernel[rows, blocks](*given, level, BY_MASS=by_mass, LEVELS=levels, **options)
        if wanted:
            settle_kernel[rows, blocks](*given, BY_MASS=by_mass, LEVELS=levels, **options)
    return states, sums
