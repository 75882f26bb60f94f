"""Scores of tokens: (logit - largest logit of the row) / temperature, and Gumbel noise.

The noise is bitwise equal to `tercet.kernels.ops.philox`. Its two logarithms are computed in float64, but only for
tokens that may win. For all others an upper bound of the score shows that they cannot: -log(-log(1 - u)) is at most
-log(u), and the exponent and the mantissa of a float32, read as one integer, are at most 0.09 above its logarithm.
"""

import triton
import triton.language as tl

COLDEST = tl.constexpr(1e-30)
NEVER = tl.constexpr(float("-inf"))
FARTHEST = tl.constexpr(0x7F800000)
"""Bits of infinity: tokens at this distance below the likeliest have probability 0."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)
_TOLERANCE = tl.constexpr(1e-3)
"""More than the rounding of an upper bound that is near a winner's score."""


@triton.jit
def output_word(seed_low, seed_high, choice, position, token):
    """Return the first output word of Philox4x32-10 for each token, uint32; `seed_low` to `position` are scalars.

    A product of 64 bits is one instruction, and what depends on no token is computed once.
    """
    c0, c1, c2, c3 = choice.to(tl.uint32), position.to(tl.uint32), token.to(tl.uint32), choice.to(tl.uint32) * 0
    k0, k1 = seed_low.to(tl.uint32), seed_high.to(tl.uint32)
    for _ in tl.static_range(10):
        left, right = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (right >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (left >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = right.to(tl.uint32), left.to(tl.uint32)
        k0, k1 = k0 + 0x9E3779B9, k1 + 0xBB67AE85
    return c0


@triton.jit
def unit_interval(word):
    """Return the uniforms of output words, float32."""
    return tl.minimum(((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32), 0.99999994039535522)


@triton.jit
def gumbel(u):
    """Return exact Gumbel noise: float64 logarithms, rounded to float32.

    1 - u is exact in float64, because u is a multiple of 2**-33.
    """
    return (-tl.log(-tl.log(1.0 - u.to(tl.float64)))).to(tl.float32)


@triton.jit
def gumbel_bound(word):
    """Return an upper bound of the noise of output words, in base 2; of less than 0.1 above it where u is small."""
    bits = word.to(tl.float32).to(tl.int32, bitcast=True)
    return 159.0 - bits.to(tl.float32) * 1.1920928955078125e-07


@triton.jit
def noise_of(seed_low_ptr, seed_high_ptr, choice_ptr, position_ptr, row):
    """Return the four words of a row that `output_word` begins with."""
    seed_low, seed_high = tl.load(seed_low_ptr + row), tl.load(seed_high_ptr + row)
    return seed_low, seed_high, tl.load(choice_ptr + row), tl.load(position_ptr + row)


@triton.jit
def highest_of(bests_ptr, row, blocks, BLOCKS: tl.constexpr):
    """Return the largest logit of a row from those of its blocks."""
    index = tl.arange(0, BLOCKS)
    return tl.max(tl.load(bests_ptr + row * blocks + index, mask=index < blocks, other=NEVER), 0)


@triton.jit
def highest_in(logits):
    """Return the largest logit of a block; infinity for a NaN, since rows with either have no draw."""
    return tl.max(tl.where(logits < float("inf"), logits, float("inf")), 0)


@triton.jit
def scaled_logits(logits, highest, temperature):
    """Return scores of at most 0, and their distances from 0 as bits, which order like integers."""
    scaled = tl.div_rn(logits.to(tl.float32) - highest, tl.maximum(temperature, COLDEST))
    return scaled, (0.0 - scaled).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def sharpness(temperature):
    """Return the factor of logits in scores of base 2."""
    return _LOG2_E / tl.maximum(temperature, COLDEST)


@triton.jit
def score_bounds(token, logits, highest, temperature, noise):
    """Return upper bounds of the scores with noise of tokens, in base 2; -inf where a logit is."""
    word = output_word(noise[0], noise[1], noise[2], noise[3], token)
    return (logits - highest) * sharpness(temperature) + gumbel_bound(word)


@triton.jit
def may_beat(bound, best):
    """Return whether a token with an upper bound in base 2 may have a score of at least `best`, float64."""
    return bound.to(tl.float64) * _LN_2 + _TOLERANCE >= best


@triton.jit
def better_of(token, bounds, best, winner, logits_ptr, highest, temperature, noise, vocab):
    """Return (the best exact score, its token) of the winner so far and the tokens of a block; the lowest id wins ties.

    `logits_ptr` points to the row; `best` is float64.
    """
    bound = tl.max(bounds, 0)
    while (bound > NEVER) & may_beat(bound, best):
        tried = tl.min(tl.where(bounds == bound, token, vocab), 0)
        scaled, _ = scaled_logits(tl.load(logits_ptr + tried), highest, temperature)
        u = unit_interval(output_word(noise[0], noise[1], noise[2], noise[3], tried))
        score = scaled.to(tl.float64) + gumbel(u).to(tl.float64)
        better = (score > best) | ((score == best) & (tried < winner))
        winner = tl.where(better, tried, winner)
        best = tl.where(better, score, best)
        bounds = tl.where(token == tried, NEVER, bounds)
        bound = tl.max(bounds, 0)
    return best, winner
