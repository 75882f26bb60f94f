"""Scores of tokens: how far their logits lie below the largest of the row, at its temperature, and with noise."""

import triton
import triton.language as tl

from tercet.kernels.triton.sampling.noise import gumbel

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
    """Scores of at most 0, and their distances from it: their bits, which order as integers do."""
    scaled = tl.div_rn(logits.to(tl.float32) - highest, tl.maximum(temperature, COLDEST))
    return scaled, (0.0 - scaled).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def best_draw(token, scaled, u, vocab):
    """(the best score with noise made of the uniforms `u`, float64; its token: of equal ones the lowest)."""
    score = scaled.to(tl.float64) + gumbel(u).to(tl.float64)
    most = tl.max(score, 0)
    return most, tl.min(tl.where(score == most, token, vocab), 0)
