"""Top-p by rejection: a token is drawn from all, and redrawn if top-p does not keep it.

Top-p keeps a prefix of the tokens ordered by score and id: those with less than a share of `top_p` of all mass before
them. If the token with the best noisy score is kept, it is also the best of the kept ones. If it is not, no token after
it is kept either, and the best of those before it is tried next. A draw from all is accepted with probability `top_p`;
a rejected draw leaves on average half of the excluded mass. Almost all rows therefore need one draw, which blocks of
the vocabulary compute in parallel (`sampling`); one program redraws each of the other rows.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait
from tercet.kernels.triton.sampling.scores import (
    NEVER,
    best_draw,
    gumbel_approximate,
    highest_of,
    row_uniforms,
    scaled_logits,
)

MARGIN = tl.constexpr(0.01)
"""Upper bound of the error of `gumbel_approximate`."""


@triton.jit
def _before(logits_ptr, row, block, vocab, stride, highest, temperature, drawn, BLOCK: tl.constexpr):
    """Return (the tokens of a block, their scores), -inf for tokens that are not before the drawn one."""
    _, limit = scaled_logits(tl.load(logits_ptr + row * stride + drawn), highest, temperature)
    token = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER)
    scaled, distance = scaled_logits(logits, highest, temperature)
    return token, tl.where((distance < limit) | ((distance == limit) & (token < drawn)), scaled, NEVER)


@triton.jit(do_not_specialize=["temperature_ptr", "top_p_ptr", "tokens_ptr"])
def preceding_mass_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, bests_ptr, tokens_ptr,
    masses_ptr,  # float32 [2, rows, blocks]: mass of all that top-k keeps, and mass before the drawn token
    vocab, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute the mass of one block of one row before the drawn token."""
    row, rows, block = tl.program_id(0).to(tl.int64), tl.num_programs(0), tl.program_id(1)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    drawn = tl.load(tokens_ptr + row)
    if (tl.load(top_p_ptr + row) < 1) & (drawn >= 0):
        highest, temperature = highest_of(bests_ptr, row, blocks, BLOCKS), tl.load(temperature_ptr + row)
        _, scaled = _before(logits_ptr, row, block, vocab, stride, highest, temperature, drawn, BLOCK)
        tl.store(masses_ptr + (rows + row) * blocks + block, tl.sum(tl.exp(scaled), 0))


@triton.jit
def _sum_of(masses_ptr, row, blocks, BLOCKS: tl.constexpr):
    index = tl.arange(0, BLOCKS)
    return tl.sum(tl.load(masses_ptr + row * blocks + index, mask=index < blocks, other=0.0).to(tl.float64), 0)


@triton.jit(
    do_not_specialize=[
        *("temperature_ptr", "top_p_ptr", "seed_low_ptr", "seed_high_ptr", "choice_ptr", "position_ptr", "tokens_ptr")
    ]
)
def redraw_kernel(
    logits_ptr, temperature_ptr, top_p_ptr, seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, bests_ptr,
    tokens_ptr, masses_ptr, vocab, stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Redraw for one row until top-p keeps the drawn token.

    Top-k and min-p also keep prefixes, so they keep every token before one that they keep.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    top_p, drawn = tl.load(top_p_ptr + row), tl.load(tokens_ptr + row)
    if (top_p < 1) & (drawn >= 0):
        wanted = top_p.to(tl.float64) * _sum_of(masses_ptr, row, blocks, BLOCKS)
        before = _sum_of(masses_ptr, rows + row, blocks, BLOCKS)
        highest, temperature = highest_of(bests_ptr, row, blocks, BLOCKS), tl.load(temperature_ptr + row)
        while (before >= wanted) & (before > 0):  # the likeliest token has no mass before it and is always kept
            best, winner = tl.full([], NEVER, tl.float64), drawn
            for block in tl.range(blocks):
                token, scaled = _before(logits_ptr, row, block, vocab, stride, highest, temperature, drawn, BLOCK)
                if tl.max(scaled, 0) > NEVER:
                    u = row_uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token)
                    if tl.max(scaled + gumbel_approximate(u), 0) > best - MARGIN:
                        most, who = best_draw(token, scaled, u, vocab)
                        winner = tl.where(most > best, who.to(tl.int64), winner)
                        best = tl.maximum(best, most)
            drawn = winner
            before = tl.zeros([], tl.float64)
            for block in tl.range(blocks):
                _, scaled = _before(logits_ptr, row, block, vocab, stride, highest, temperature, drawn, BLOCK)
                before += tl.sum(tl.exp(scaled), 0).to(tl.float64)
        tl.store(tokens_ptr + row, drawn)
