"""Scores of tokens: (logit - largest logit of the row) / temperature, and Gumbel noise.

The noise is bitwise equal to `tercet.kernels.ops.philox`.
"""

import triton
import triton.language as tl

COLDEST = tl.constexpr(1e-30)
NEVER = tl.constexpr(float("-inf"))
FARTHEST = tl.constexpr(0x7F800000)
"""Bits of infinity: tokens at this distance below the likeliest have probability 0."""


@triton.jit
def unit_interval(seed, choice, position, token):
    """Return the uniform of each token, float32; `seed` is an int64 scalar, `choice` and `position` are int32."""
    zero = token * 0
    word, _, _, _ = tl.philox(seed, zero + choice, zero + position, token, zero)
    return tl.minimum(((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32), 0.99999994039535522)


@triton.jit
def gumbel(u):
    """Return exact Gumbel noise: float64 logarithms, rounded to float32.

    1 - u is exact in float64, because u is a multiple of 2**-33.
    """
    return (-tl.log(-tl.log(1.0 - u.to(tl.float64)))).to(tl.float32)


@triton.jit
def gumbel_approximate(u):
    """Return Gumbel noise within 1e-3 of `gumbel`, in float32: a series where 1 - u would lose digits of u."""
    small = u < 0.00390625
    series = u + u * u * (0.5 + u * 0.3333333)
    return -tl.log(tl.where(small, series, -tl.log(1.0 - tl.where(small, 0.5, u))))


@triton.jit
def row_uniforms(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row, token):
    """Return the uniforms of tokens of a row."""
    seed = tl.load(seed_low_ptr + row) | (tl.load(seed_high_ptr + row) << 32)
    choice, position = tl.load(choice_ptr + row), tl.load(position_ptr + row)
    return unit_interval(seed, choice.to(tl.int32), position.to(tl.int32), token)


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
