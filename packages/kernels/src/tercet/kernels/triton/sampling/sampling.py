"""Sampling: every row is cut into blocks of the vocabulary, which are processed in parallel.

The reference is `tercet.kernels.ops.sampling.sample`. The kernels in order: the largest logit of every block; the
limits of top-k (`top_k`); the best score of every block, with approximate noise; the winner of each row, where only
blocks that may hold it are scored again, in float64; and a redraw if top-p rejects the winner (`top_p`). The host never
waits, and sums are always added in the same order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.triton.launch import Tiling, cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.sampling.scores import (
    FARTHEST,
    NEVER,
    best_draw,
    gumbel_approximate,
    highest_of,
    row_uniforms,
    scaled_logits,
)
from tercet.kernels.triton.sampling.top_k import LEVELS, allocate_limits, find_limits, top_k_limits
from tercet.kernels.triton.sampling.top_p import MARGIN, preceding_mass_kernel, redraw_kernel

TILINGS = (Tiling(2048, 4), Tiling(1024, 2), Tiling(1024, 4), Tiling(2048, 2), Tiling(2048, 8), Tiling(4096, 8))
"""Tilings by logits of one row; programs of a whole row always use 8 or 16 warps. The first is in use."""
_OF_ROWS = [
    *("temperature_ptr", "top_k_ptr", "min_p_ptr"),
    *("seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr", "tokens_ptr"),
]
"""Parameters that point into one buffer, whose alignment varies with the number of rows; not specialized on."""


@triton.jit
def highest_kernel(logits_ptr, bests_ptr, vocab, stride, blocks, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute the largest logit of one block of one row; infinity for a NaN, since rows with either have no draw."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER).to(tl.float32)
    broken = (logits.to(tl.int32, bitcast=True) & 0x7FFFFFFF) > FARTHEST
    tl.store(bests_ptr + row * blocks + block, tl.max(tl.where(broken, float("inf"), logits), 0))


@triton.jit
def _scores(
    logits_ptr, temperature_ptr, top_k_ptr, limits_ptr, counts_ptr, row, rows, block, vocab, stride, blocks, highest,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Return (the tokens of a block, their scores without noise), -inf for those that top-k drops."""
    token = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER)
    scaled, distance = scaled_logits(logits, highest, tl.load(temperature_ptr + row))
    if LEVELS > 0:
        limit, ties, tied = top_k_limits(top_k_ptr, limits_ptr, counts_ptr, vocab, row, rows, blocks, LEVELS, BLOCKS)
        equal = (distance == limit).to(tl.int32)
        before = tl.sum(tl.where(tl.arange(0, BLOCKS) < block, tied, 0), 0)
        rank = before + tl.cumsum(equal, 0) - equal
        scaled = tl.where((distance < limit) | ((equal > 0) & (rank < ties)), scaled, NEVER)
    return token, scaled


@triton.jit
def _likely_enough(scaled, min_p_ptr, row, LEVELS: tl.constexpr):
    """Return scores with -inf for those that min-p drops."""
    if LEVELS > 0:
        min_p = tl.load(min_p_ptr + row)
        if min_p > 0:
            scaled = tl.where(scaled >= tl.log(min_p.to(tl.float64)).to(tl.float32), scaled, NEVER)
    return scaled


@triton.jit(do_not_specialize=_OF_ROWS)
def approximate_scores_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, min_p_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr,
    bests_ptr,  # float32 [2, rows, blocks]: the largest logits (input), the best scores (output)
    limits_ptr, counts_ptr,
    masses_ptr,  # float32 [2, rows, blocks]: output in the first half, the mass that top-k keeps
    vocab, stride, blocks,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the best score of one block of one row with approximate noise; with filters, also the block's mass."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    best = NEVER
    if tl.abs(highest) < float("inf"):
        token, scaled = _scores(
            logits_ptr, temperature_ptr, top_k_ptr, limits_ptr, counts_ptr, row, rows, block, vocab, stride, blocks,
            highest, LEVELS, BLOCK, BLOCKS,
        )  # fmt: skip
        if LEVELS > 0:
            tl.store(masses_ptr + row * blocks + block, tl.sum(tl.exp(scaled), 0))
        scaled = _likely_enough(scaled, min_p_ptr, row, LEVELS)
        if tl.max(scaled, 0) > NEVER:
            u = row_uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token)
            best = tl.max(scaled + gumbel_approximate(u), 0)
    tl.store(bests_ptr + (rows + row) * blocks + block, best)


@triton.jit(do_not_specialize=_OF_ROWS)
def winner_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, min_p_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr,
    bests_ptr, limits_ptr, counts_ptr, tokens_ptr, vocab, stride, blocks,
    LEVELS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the token of one row with the largest exact score and noise; -1 without one."""
    row, rows, index = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCKS)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    approximate_scores = tl.load(bests_ptr + (rows + row) * blocks + index, mask=index < blocks, other=NEVER)
    may_win = approximate_scores > tl.max(approximate_scores, 0) - 2 * MARGIN
    block = tl.min(tl.where(may_win, index, BLOCKS), 0)
    winner = tl.full([], -1, tl.int32)
    if block < BLOCKS:
        highest = highest_of(bests_ptr, row, blocks, BLOCKS)
        best = tl.full([], NEVER, tl.float64)
        while block < BLOCKS:
            token, scaled = _scores(
                logits_ptr, temperature_ptr, top_k_ptr, limits_ptr, counts_ptr, row, rows, block, vocab, stride, blocks,
                highest, LEVELS, BLOCK, BLOCKS,
            )  # fmt: skip
            scaled = _likely_enough(scaled, min_p_ptr, row, LEVELS)
            u = row_uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token)
            most, who = best_draw(token, scaled, u, vocab)
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
    """Sample the same tokens as the reference, except where probabilities lie within rounding of top-p."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    blocks, levels = cdiv(vocab, tiling.block), 0
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    bests = torch.empty(2, rows, blocks, device=logits.device)
    shape = vocab, logits.stride(0), blocks
    pdl = {**pdl_options(logits.device), "BLOCK": tiling.block}
    whole: dict[str, Any] = {**pdl, "BLOCKS": power_of_two(blocks)}
    options = {**whole, "num_warps": tiling.warps}
    temperature = temperature.contiguous()
    words = [word.contiguous() for word in (noise.seed_low, noise.seed_high, noise.choice, noise.position)]
    top_k = min_p = limits = counts = masses = None
    launch(highest_kernel, (rows, blocks), (logits, bests), shape, num_warps=tiling.warps, **pdl)
    if filters is not None:
        levels = LEVELS[logits.dtype]
        top_k, top_p, min_p = (given.contiguous() for given in (filters.top_k, filters.top_p, filters.min_p))
        limits, counts = found = allocate_limits(logits, blocks)
        masses = torch.empty_like(bests)
        if "top_k" not in filters.off:
            find_limits(logits, temperature, top_k, bests, found, shape, options)
    given = logits, temperature, top_k, min_p, *words, bests, limits, counts
    launch(approximate_scores_kernel, (rows, blocks), (*given, masses), shape, LEVELS=levels, **options)
    launch(winner_kernel, (rows,), (*given, tokens), shape, LEVELS=levels, num_warps=8, **whole)
    if filters is not None and "top_p" not in filters.off:
        launch(
            preceding_mass_kernel, (rows, blocks), (logits, temperature, top_p, bests, tokens, masses), shape, **options
        )
        drawn = logits, temperature, top_p, *words, bests, tokens, masses
        launch(redraw_kernel, (rows,), drawn, shape, num_warps=16, **whole)
    return tokens
