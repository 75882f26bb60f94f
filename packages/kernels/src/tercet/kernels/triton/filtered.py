"""Drawing tokens without sorting: the sets that top-k, top-p and min-p keep are found by their thresholds.

The reference is `tercet.kernels.ops.sampling.sample`. Each filter keeps a beginning of the tokens ordered by logit and
id. So two numbers say what it keeps: the *distance* of its last token below the likeliest, as the bits of a float32,
which order as integers do, and how many tokens of just that distance it keeps, by id. The distance is found two bits at
a time: sixteen passes over the row count the tokens, or add up the probability, nearer than three candidates.
The last pass draws: noise nearly exact says which blocks may hold the winner, and only there float64 decides.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.triton.noise import gumbel, gumbel_nearly, unit_interval

_BLOCK = 4096
COLDEST = tl.constexpr(1e-30)
NEVER = tl.constexpr(float("-inf"))
FARTHEST = tl.constexpr(0x7F800000)
"""The bits of infinity: what is as far as this below the likeliest has no chance."""
MARGIN = tl.constexpr(0.01)
"""More than `gumbel_nearly` may be wrong by."""


@triton.jit
def _scaled(logits_ptr, token, vocab, highest, temperature):
    """Scores [BLOCK] of at most 0, and their distances from it; beyond the vocabulary, as far as can be."""
    logits = tl.load(logits_ptr + token, mask=token < vocab, other=NEVER).to(tl.float32)
    scaled = tl.div_rn(logits - highest, temperature)
    return scaled, (0.0 - scaled).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _threshold(logits_ptr, vocab, highest, temperature, wanted, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """(the least distance within which `wanted` tokens lie, or so much mass; what lies nearer)."""
    found = tl.zeros([], tl.int32)
    nearer = tl.zeros([], tl.float64)
    for level in tl.range(16):
        shift = 30 - 2 * level
        first = nearer * 0
        second = nearer * 0
        third = nearer * 0
        for start in tl.range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            scaled, distance = _scaled(logits_ptr, token, vocab, highest, temperature)
            amount = tl.where((token < vocab) & (distance >= found), 1.0, 0.0)
            if BY_MASS:
                amount *= tl.exp(scaled)
            digit = (distance - found) >> shift
            first += tl.sum(tl.where(digit < 1, amount, 0.0), 0).to(tl.float64)
            second += tl.sum(tl.where(digit < 2, amount, 0.0), 0).to(tl.float64)
            third += tl.sum(tl.where(digit < 3, amount, 0.0), 0).to(tl.float64)
        beyond_1 = nearer + first < wanted
        beyond_2 = (nearer + second < wanted) & (level > 0)  # the first digit has one bit
        beyond_3 = (nearer + third < wanted) & (level > 0)
        found += (beyond_1.to(tl.int32) + beyond_2.to(tl.int32) + beyond_3.to(tl.int32)) << shift
        nearer += tl.where(beyond_3, third, tl.where(beyond_2, second, tl.where(beyond_1, first, 0.0)))
    return found, nearer


@triton.jit
def _kept(logits_ptr, vocab, highest, temperature, top_k, top_p, BLOCK: tl.constexpr):
    """(the largest distance that top-k and top-p keep, how many tokens of just that distance)."""
    limit = tl.full([], FARTHEST, tl.int32)
    ties = vocab + tl.zeros([], tl.int32)
    total = tl.zeros([], tl.float64)
    if top_k > 0:
        limit, nearer = _threshold(logits_ptr, vocab, highest, temperature, top_k.to(tl.float64), False, BLOCK)
        ties = (top_k.to(tl.float64) - nearer).to(tl.int32)
        total += ties.to(tl.float64) * tl.exp(-limit.to(tl.float32, bitcast=True)).to(tl.float64)
    if top_p < 1:
        for start in tl.range(0, vocab, BLOCK):
            token = start + tl.arange(0, BLOCK)
            scaled, distance = _scaled(logits_ptr, token, vocab, highest, temperature)
            total += tl.sum(tl.where(distance < limit, tl.exp(scaled), 0.0), 0).to(tl.float64)
        wanted = top_p.to(tl.float64) * total
        found, nearer = _threshold(logits_ptr, vocab, highest, temperature, wanted, True, BLOCK)
        each = tl.exp(-found.to(tl.float32, bitcast=True)).to(tl.float64)
        count = tl.maximum(tl.ceil((wanted - nearer) / tl.where(each > 0, each, 1.0)), 1.0)
        some = tl.minimum(count, vocab.to(tl.float64)).to(tl.int32)
        ties = tl.where(found < limit, some, tl.where(found == limit, tl.minimum(some, ties), ties))
        limit = tl.minimum(found, limit)
    return limit, ties


@triton.jit
def _draw(
    logits_ptr,
    vocab,
    highest,
    temperature,
    limit,
    ties,
    floor,
    seed,
    choice,
    position,
    BLOCK: tl.constexpr,
):
    """The kept token with the largest score and noise; -1 where there is none."""
    best = tl.full([], NEVER, tl.float64)
    winner = tl.full([], -1, tl.int32)
    before = tl.zeros([], tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        scaled, distance = _scaled(logits_ptr, token, vocab, highest, temperature)
        keep = scaled > NEVER
        tied = (distance == limit).to(tl.int32)
        rank = before + tl.cumsum(tied, 0) - tied
        keep = keep & ((distance < limit) | ((tied > 0) & (rank < ties))) & (scaled >= floor)
        before += tl.sum(tied, 0)
        if tl.max(keep.to(tl.int32), 0) > 0:
            u = unit_interval(seed, choice, position, token)
            nearly = tl.max(tl.where(keep, scaled + gumbel_nearly(u), NEVER), 0)
            if nearly.to(tl.float64) + MARGIN > best:
                score = tl.where(keep, scaled.to(tl.float64) + gumbel(u).to(tl.float64), NEVER)
                most = tl.max(score, 0)
                who = tl.min(tl.where(score == most, token, vocab), 0)
                winner = tl.where(most > best, who, winner)
                best = tl.maximum(best, most)
    return winner


@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    floor_ptr,
    seed_low_ptr,
    seed_high_ptr,
    choice_ptr,
    position_ptr,
    tokens_ptr,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """One row, by one program."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    highest = tl.full([], NEVER, tl.float32)
    broken = tl.zeros([], tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + token, mask=token < vocab, other=NEVER).to(tl.float32)
        highest = tl.maximum(highest, tl.max(logits, 0))
        broken += tl.sum(((logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > FARTHEST).to(tl.int32), 0)
    winner = tl.full([], -1, tl.int32)
    if (broken == 0) & (tl.abs(highest) < float("inf")):
        temperature = tl.maximum(tl.load(temperature_ptr + row), COLDEST)
        seed = tl.load(seed_low_ptr + row) | (tl.load(seed_high_ptr + row) << 32)
        choice = tl.load(choice_ptr + row).to(tl.int32)
        position = tl.load(position_ptr + row).to(tl.int32)
        top_k = tl.minimum(tl.load(top_k_ptr + row), vocab).to(tl.int32)
        limit, ties = _kept(logits_ptr, vocab, highest, temperature, top_k, tl.load(top_p_ptr + row), BLOCK)
        floor = tl.load(floor_ptr + row)
        winner = _draw(logits_ptr, vocab, highest, temperature, limit, ties, floor, seed, choice, position, BLOCK)
    tl.store(tokens_ptr + row, winner.to(tl.int64))


def sample_filtered(logits: torch.Tensor, temperature: torch.Tensor, filters: Filters, noise: NoiseKey) -> torch.Tensor:
    """As the reference, to the token, but for probabilities that lie within rounding of top-p."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sample_kernel[(rows,)](
        logits,
        temperature.contiguous(),
        filters.top_k.contiguous(),
        filters.top_p.contiguous(),
        filters.min_p.log(),
        noise.seed_low.contiguous(),
        noise.seed_high.contiguous(),
        noise.choice.contiguous(),
        noise.position.contiguous(),
        tokens,
        vocab,
        logits.stride(0),
        BLOCK=_BLOCK,
        num_warps=16,
    )
    return tokens
