"""Scores of tokens: (logit - largest logit of the row) / temperature, and Gumbel noise."""

import triton
import triton.language as tl

from tercet.kernels.triton.sampling.noise import gumbel

COLDEST = tl.constexpr(1e-30)
NEVER = tl.constexpr(float("-inf"))
FARTHEST = tl.constexpr(0x7F800000)
"""Bits of infinity: tokens at this distance below the likeliest have probability 0."""


@triton.jit
def highest_of(bests_ptr, row, blocks, BLOCKS: tl.constexpr):
    """Return the largest logit of a row from those of its blocks."""
    index = tl.arange(0, BLOCKS)
    return tl.max(tl.load(bests_ptr + row * blocks + index, mask=index < blocks, other=NEVER), 0)


@triton.jit
def scaled_logits(logits, highest, temperature):
    """Return scores of at most 0, and their distances from 0 as bits, which order like integers."""
    scaled = tl.div_rn(logits.to(tl.float32) - highest, tl.maximum(temperature, COLDEST))
    return scaled, (0.0 - scaled).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def best_draw(token, scaled, u, vocab):
    """Return (the best score with exact noise from uniforms `u`, float64; its token, the lowest id on ties)."""
    score = scaled.to(tl.float64) + gumbel(u).to(tl.float64)
    most = tl.max(score, 0)
    return most, tl.min(tl.where(score == most, token, vocab), 0)
