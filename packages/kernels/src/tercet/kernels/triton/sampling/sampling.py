"""Sampling: every row is cut into blocks of the vocabulary, which are processed in parallel and read once.

The reference is `tercet.kernels.ops.sampling.sample`. A draw from all tokens takes two kernels: the largest logit of
every block and an upper bound of its scores with noise; and the winner of each row, where only tokens that may win are
scored exactly. A filtered draw takes three: a sample of each row, which says where its likeliest tokens begin; these
tokens in a list (`candidates`); and the draw from the list (`filters`). The host never waits, and a draw is the same on
every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.philox import NoiseKey
from tercet.kernels.ops.sampling import Filters
from tercet.kernels.triton.launch import Tiling, cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.sampling.candidates import collect_kernel, cut_kernel
from tercet.kernels.triton.sampling.filters import choose_kernel
from tercet.kernels.triton.sampling.scores import (
    NEVER,
    better_of,
    highest_in,
    highest_of,
    may_beat,
    noise_of,
    score_bounds,
    sharpness,
)

TILINGS = (Tiling(2048, 8), Tiling(1024, 2), Tiling(1024, 4), Tiling(2048, 2), Tiling(2048, 4), Tiling(4096, 8))
"""Tilings by logits of one row; programs of a whole row always use 8 warps. The first is in use."""
CAPACITY = 16384
"""Candidates of a row that its list has places for: 128 KiB. Of these, 5/8 are wanted of a row without top-k."""
_TILE = 2048
"""Candidates that a program of a whole row has in registers."""


@triton.jit(do_not_specialize=["temperature_ptr", "seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr"])
def score_bounds_kernel(
    logits_ptr, temperature_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr,
    bests_ptr,  # float32 [2, rows, blocks]: the largest logits, and the upper bounds of scores relative to these
    vocab, stride, blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the largest logit of one block of one row, and an upper bound of its scores with noise, in base 2."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER).to(tl.float32)
    noise = noise_of(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row)
    highest = highest_in(logits)
    bound = NEVER
    if tl.abs(highest) < float("inf"):
        bound = tl.max(score_bounds(token, logits, highest, tl.load(temperature_ptr + row), noise), 0)
    at = bests_ptr + row * blocks + block
    tl.store(at, highest)
    tl.store(at + rows * blocks, bound)


@triton.jit(do_not_specialize=["temperature_ptr", "seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr"])
def winner_kernel(
    logits_ptr, temperature_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, bests_ptr,
    tokens_ptr,  # int64 [rows]: output
    vocab, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store the token of one row with the largest exact score and noise; -1 without one."""
    row, rows, index = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.arange(0, BLOCKS)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    highest = highest_of(bests_ptr, row, blocks, BLOCKS)
    winner = tl.full([], -1, tl.int32)
    if tl.abs(highest) < float("inf"):
        temperature = tl.load(temperature_ptr + row)
        noise = noise_of(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row)
        at = bests_ptr + row * blocks + index
        bests = tl.load(at, mask=index < blocks, other=NEVER)
        bounds = tl.load(at + rows * blocks, mask=index < blocks, other=NEVER)
        bounds += (bests - highest) * sharpness(temperature)
        best = tl.full([], NEVER, tl.float64)
        bound = tl.max(bounds, 0)
        while (bound > NEVER) & may_beat(bound, best):
            block = tl.min(tl.where(bounds == bound, index, BLOCKS), 0)
            bounds = tl.where(index == block, NEVER, bounds)
            bound = tl.max(bounds, 0)
            token = block * BLOCK + tl.arange(0, BLOCK)
            row_ptr = logits_ptr + row * stride
            logits = tl.load(row_ptr + token, mask=token < vocab, other=NEVER).to(tl.float32)
            each = score_bounds(token, logits, highest, temperature, noise)
            best, winner = better_of(token, each, best, winner, row_ptr, highest, temperature, noise, vocab)
    tl.store(tokens_ptr + row, winner.to(tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    filters: Filters | None,
    noise: NoiseKey,
    *,
    tiling: Tiling = TILINGS[0],
    capacity: int = CAPACITY,
) -> torch.Tensor:
    """Sample the same tokens as the reference, except where probabilities lie within rounding of top-p."""
    rows, vocab = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    blocks = cdiv(vocab, tiling.block)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    shape = vocab, logits.stride(0), blocks
    pdl = pdl_options(logits.device)
    of_blocks: dict[str, Any] = {"BLOCK": tiling.block, "num_warps": tiling.warps, **pdl}
    of_rows: dict[str, Any] = {"BLOCKS": power_of_two(blocks), "num_warps": 8, **pdl}
    temperature = temperature.contiguous()
    words = [word.contiguous() for word in (noise.seed_low, noise.seed_high, noise.choice, noise.position)]
    if filters is None:
        given = logits, temperature, *words, torch.empty(2, rows, blocks, device=logits.device)
        launch(score_bounds_kernel, (rows, blocks), given, shape, **of_blocks)
        launch(winner_kernel, (rows,), (*given, tokens), shape, BLOCK=tiling.block, **of_rows)
        return tokens
    room = {"CAPACITY": capacity}
    top_k, top_p, min_p = (given.contiguous() for given in (filters.top_k, filters.top_p, filters.min_p))
    cuts, bests, sums = (torch.empty(size, device=logits.device) for size in (rows, rows * blocks, rows * blocks))
    counts, listed = (torch.empty(size, dtype=torch.int32, device=logits.device) for size in (rows, rows * capacity))
    found = cuts, counts, listed, torch.empty(rows * capacity, device=logits.device), bests, sums
    launch(cut_kernel, (rows,), (logits, top_k, cuts, counts), shape[:2], num_warps=8, **room, **pdl)
    launch(collect_kernel, (rows, blocks), (logits, temperature, *found), shape, **room, **of_blocks)
    given = logits, temperature, top_k, top_p, min_p, *words, *found, tokens
    launch(choose_kernel, (rows,), given, shape, TILE=_TILE, **room, **of_rows)
    return tokens
