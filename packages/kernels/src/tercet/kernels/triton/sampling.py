"""Drawing tokens: every row is cut into blocks of the vocabulary, which are looked at side by side.

The reference is `tercet.kernels.ops.sampling.sample`. Kernels follow each other: the largest logit of every block; what
the filters keep (`thresholds`); the best score of every block, with noise that is nearly exact; and of each row the
winner, where only the blocks that may hold it are scored again, in float64. Nothing waits for the host, and sums are
added up in the same order always.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.triton.launch import Tiling, await_previous, early_start, power_of_two, release_next
from tercet.kernels.triton.noise import gumbel, gumbel_nearly, unit_interval
from tercet.kernels.triton.thresholds import FARTHEST, LEVELS, NEVER, find, highest_of, kept, scaled_logits

TILINGS = (Tiling(2048, 4), Tiling(1024, 2), Tiling(1024, 4), Tiling(2048, 2), Tiling(2048, 8), Tiling(4096, 8))
"""Logits of one row; the warps of the winner, one program a row, are always 8. The first is the one in use."""
MARGIN = tl.constexpr(0.01)
"""More than `gumbel_nearly` may be wrong by."""
_OF_ROWS = [
    *("temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"),
    *("seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr", "tokens_ptr"),
]
"""Parts of one buffer, which begin at other bytes for other numbers of rows: no reason to compile again."""


@triton.jit
def highest_kernel(logits_ptr, bests_ptr, vocab, stride, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The largest logit of one block of one row; infinity where there is a NaN: neither kind of row has a draw."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    await_previous(EARLY)
    release_next(EARLY)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER).to(tl.float32)
    broken = (logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > FARTHEST
    tl.store(bests_ptr + row * blocks + block, tl.max(tl.where(broken, float("inf"), logits), 0))


@triton.jit
def _kept_of_row(
    top_k_ptr, top_p_ptr, min_p_ptr, states_ptr, sums_ptr, vocab, row, rows, blocks,
    LEVELS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """As `kept`, and the least score that min-p keeps."""
    limit = tl.full([], FARTHEST, tl.int32)
    ties = vocab + tl.zeros([], tl.int32)
    tied = tl.zeros([BLOCKS], tl.int32)
    floor = tl.full([], NEVER, tl.float32)
    if LEVELS > 0:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        limit, ties, tied = kept(states_ptr, sums_ptr, top_k, top_p, vocab, row, rows, blocks, LEVELS, BLOCKS)
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0:
            floor = tl.log(min_p.to(tl.float64)).to(tl.float32)
    return limit, ties, tied, floor


@triton.jit
def _scores(
    logits_ptr, row, block, vocab, stride, highest, temperature, limit, ties, tied, floor,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """(the tokens of a block, their scores without noise): -inf of those that are not kept."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER)
    scaled, distance = scaled_logits(logits, highest, temperature)
    if FILTERED:
        equal = (distance == limit).to(tl.int32)
        before = tl.sum(tl.where(tl.arange(0, BLOCKS) < block, tied, 0), 0)
        rank = before + tl.cumsum(equal, 0) - equal
        keep = ((distance < limit) | ((equal > 0) & (rank < ties))) & (scaled >= floor)
        scaled = tl.where(keep, scaled, NEVER)
    return token, scaled


@triton.jit
def _uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token):
    """What the noise of these tokens of a row is made of."""
    seed = tl.load(seed_low_ptr + row) | (tl.load(seed_high_ptr + row) << 32)
    choice, position = tl.load(choice_ptr + row), tl.load(position_ptr + row)
    return unit_interval(seed, choice.to(tl.int32), position.to(tl.int32), token)


@triton.jit(do_not_specialize=_OF_ROWS)
def nearly_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr,
    bests_ptr,  # float32 [2, rows, blocks]: the largest logits are here, the best scores will be
    states_ptr, sums_ptr, vocab, stride, blocks,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best score of one block of one row, by noise that is nearly exact."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    await_previous(EARLY)
    release_next(EARLY)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    best = NEVER
    if tl.abs(highest) < float("inf"):
        limit, ties, tied, floor = _kept_of_row(
            top_k_ptr, top_p_ptr, min_p_ptr, states_ptr, sums_ptr, vocab, row, rows, blocks, LEVELS, BLOCKS
        )
        token, scaled = _scores(
            logits_ptr, row, block, vocab, stride, highest, tl.load(temperature_ptr + row),
            limit, ties, tied, floor, LEVELS > 0, BLOCK, BLOCKS,
        )  # fmt: skip
        if tl.max(scaled, 0) > NEVER:
            u = _uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token)
            best = tl.max(scaled + gumbel_nearly(u), 0)
    tl.store(bests_ptr + (rows + row) * blocks + block, best)


@triton.jit(do_not_specialize=_OF_ROWS)
def winner_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr,
    bests_ptr, states_ptr, sums_ptr, tokens_ptr, vocab, stride, blocks,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The token of one row with the largest score and noise, both exact; -1 where there is none."""
    row, rows, index = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCKS)
    await_previous(EARLY)
    release_next(EARLY)
    nearly = tl.load(bests_ptr + (rows + row) * blocks + index, mask=index < blocks, other=NEVER)
    may_win = nearly > tl.max(nearly, 0) - 2 * MARGIN
    block = tl.min(tl.where(may_win, index, BLOCKS), 0)
    winner = tl.full([], -1, tl.int32)
    if block < BLOCKS:
        highest = highest_of(bests_ptr, row, blocks, BLOCKS)
        temperature = tl.load(temperature_ptr + row)
        limit, ties, tied, floor = _kept_of_row(
            top_k_ptr, top_p_ptr, min_p_ptr, states_ptr, sums_ptr, vocab, row, rows, blocks, LEVELS, BLOCKS
        )
        best = tl.full([], NEVER, tl.float64)
        while block < BLOCKS:
            token, scaled = _scores(
                logits_ptr, row, block, vocab, stride, highest, temperature,
                limit, ties, tied, floor, LEVELS > 0, BLOCK, BLOCKS,
            )  # fmt: skip
            u = _uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token)
            score = scaled.to(tl.float64) + gumbel(u).to(tl.float64)
            most = tl.max(score, 0)
            who = tl.min(tl.where(score == most, token, vocab), 0)
            winner = tl.where(most > best, who, winner)
            best = tl.maximum(best, most)
            block = tl.min(tl.where(may_win & (index > block), index, BLOCKS), 0)
    tl.store(tokens_ptr + row, winner.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    filters: Filters | None,
    noise: NoiseKey,
    *,
    tiling: Tiling = TILINGS[0],
) -> torch.Tensor:
    """As the reference, to the token, but for probabilities that lie within rounding of top-p."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    blocks, levels = triton.cdiv(vocab, tiling.block), 0
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bests = torch.empty(2, rows, blocks, device=logits.device)
    shape = vocab, logits.stride(0), blocks
    early = {**early_start(logits.device), "BLOCK": tiling.block}
    whole: dict[str, Any] = {**early, "BLOCKS": power_of_two(blocks)}
    options = {**whole, "num_warps": tiling.warps}
    params: list[torch.Tensor | None] = [temperature.contiguous(), None, None, None]
    found: tuple[torch.Tensor | None, ...] = (None, None)
    highest_kernel[rows, blocks](logits, bests, *shape, num_warps=tiling.warps, **early)
    if filters is not None:
        levels = LEVELS[logits.dtype]
        params[1:] = [given.contiguous() for given in (filters.top_k, filters.top_p, filters.min_p)]
        found = find(logits, params, filters, bests, options)
    words = [word.contiguous() for word in (noise.seed_low, noise.seed_high, noise.choice, noise.position)]
    given = logits, *params, *words, bests, *found
    nearly_kernel[rows, blocks](*given, *shape, LEVELS=levels, **options)
    winner_kernel[(rows,)](*given, tokens, *shape, LEVELS=levels, num_warps=8, **whole)
    return tokens
