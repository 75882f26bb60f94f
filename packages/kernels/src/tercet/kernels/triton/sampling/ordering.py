"""The order of logits, as integers: what every kernel that looks for the largest compares."""

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """float32 as int32 of the same order: NaN is above all, and the two zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, token, vocab):
    """int64 keys, each its own: by logit, and of equal logits the lowest id is largest."""
    return (ordered(x).to(tl.int64) << 32) + (vocab - 1 - token)


@triton.jit
def token_of(key, vocab):
    """The token of a key."""
    return vocab - 1 - (key & 0xFFFFFFFF)
