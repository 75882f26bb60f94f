"""Drawing tokens: every row is cut into blocks of the vocabulary, which are looked at side by side.

The reference is `tercet.kernels.ops.sampling.sample`. Three kernels follow each other: the largest logit of every
block; with it the best score of every block, with noise that is nearly exact; and of each row the winner, where only
the blocks that may hold it are scored again, in float64.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.triton.filtered import sample_filtered
from tercet.kernels.triton.launch import await_previous, early_start, power_of_two, release_next
from tercet.kernels.triton.noise import gumbel, gumbel_nearly, unit_interval

_BLOCK = 2048
COLDEST = tl.constexpr(1e-30)
NEVER = tl.constexpr(float("-inf"))
MARGIN = tl.constexpr(0.01)
"""More than `gumbel_nearly` may be wrong by."""
ANYWHERE = ["temperature_ptr", "seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr", "tokens_ptr"]
"""Parts of one buffer, which begin at other bytes for other numbers of rows: no reason to compile again."""


@triton.jit
def highest_kernel(logits_ptr, bests_ptr, vocab, stride, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The largest logit of one block of one row; infinity where there is a NaN: neither kind of row has a draw."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    await_previous(EARLY)
    release_next(EARLY)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER).to(tl.float32)
    broken = (logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > 0x7F800000
    tl.store(bests_ptr + row * blocks + block, tl.max(tl.where(broken, float("inf"), logits), 0))


@triton.jit
def highest_of(bests_ptr, row, blocks, BLOCKS: tl.constexpr):
    """The largest logit of a row, from those of its blocks."""
    index = tl.arange(0, BLOCKS)
    return tl.max(tl.load(bests_ptr + row * blocks + index, mask=index < blocks, other=NEVER), 0)


@triton.jit
def scaled_logits(logits, highest, temperature):
    """Scores of at most 0, by how much less likely than the first a token is."""
    return tl.div_rn(logits.to(tl.float32) - highest, tl.maximum(temperature, COLDEST))


@triton.jit
def _uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token):
    """What the noise of these tokens of a row is made of."""
    seed = tl.load(seed_low_ptr + row) | (tl.load(seed_high_ptr + row) << 32)
    choice, position = tl.load(choice_ptr + row), tl.load(position_ptr + row)
    return unit_interval(seed, choice.to(tl.int32), position.to(tl.int32), token)


@triton.jit(do_not_specialize=ANYWHERE)
def nearly_kernel(
    logits_ptr, temperature_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr,
    bests_ptr,  # float32 [2, rows, blocks]: the largest logits are here, the best scores will be
    vocab, stride, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best score of one block of one row, by noise that is nearly exact."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    await_previous(EARLY)
    release_next(EARLY)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    best = NEVER
    if tl.abs(highest) < float("inf"):
        scaled = scaled_logits(logits, highest, tl.load(temperature_ptr + row))
        u = _uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token)
        best = tl.max(scaled + gumbel_nearly(u), 0)
    tl.store(bests_ptr + (tl.num_programs(0) + row) * blocks + block, best)


@triton.jit(do_not_specialize=ANYWHERE)
def winner_kernel(
    logits_ptr, temperature_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, bests_ptr, tokens_ptr,
    vocab, stride, blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The token of one row with the largest score and noise, both exact; -1 where there is none."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCKS)
    await_previous(EARLY)
    release_next(EARLY)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    nearly = tl.load(bests_ptr + (tl.num_programs(0) + row) * blocks + index, mask=index < blocks, other=NEVER)
    may_win = nearly > tl.max(nearly, 0) - 2 * MARGIN
    best = tl.full([], NEVER, tl.float64)
    winner = tl.full([], -1, tl.int32)
    block = tl.min(tl.where(may_win, index, BLOCKS), 0)
    while block < BLOCKS:
        token = block * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER)
        scaled = scaled_logits(logits, highest, tl.load(temperature_ptr + row))
        u = _uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token)
        score = scaled.to(tl.float64) + gumbel(u).to(tl.float64)
        most = tl.max(score, 0)
        who = tl.min(tl.where(score == most, token, vocab), 0)
        winner = tl.where(most > best, who, winner)
        best = tl.maximum(best, most)
        block = tl.min(tl.where(may_win & (index > block), index, BLOCKS), 0)
    tl.store(tokens_ptr + row, winner.to(tl.int64))


def sample(logits: torch.Tensor, temperature: torch.Tensor, filters: Filters | None, noise: NoiseKey) -> torch.Tensor:
    """As the reference, to the token, but for probabilities that lie within rounding of top-p."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    if filters is not None:
        return sample_filtered(logits, temperature, filters, noise)
    blocks = triton.cdiv(vocab, _BLOCK)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bests = torch.empty(2, rows, blocks, device=logits.device)
    shape = vocab, logits.stride(0), blocks
    options = {"BLOCK": _BLOCK, **early_start(logits.device)}
    words = [word.contiguous() for word in (noise.seed_low, noise.seed_high, noise.choice, noise.position)]
    given = logits, temperature.contiguous(), *words, bests
    highest_kernel[rows, blocks](logits, bests, *shape, **options)
    nearly_kernel[rows, blocks](*given, *shape, BLOCKS=power_of_two(blocks), **options)
    winner_kernel[(rows,)](*given, tokens, *shape, BLOCKS=power_of_two(blocks), num_warps=8, **options)
    return tokens
