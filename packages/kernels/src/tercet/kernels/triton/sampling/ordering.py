"""Sortable integer keys of logits, which every argmax and top-k kernel compares."""

import triton
import triton.language as tl


@triton.jit
def ordered(x):
    """Convert float32 to int32 of the same order: NaN is the largest, and the two zeros are equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x, token, vocab):
    """Return unique int64 keys: by logit, then by id, where the lowest id is largest."""
    return (ordered(x).to(tl.int64) << 32) + (vocab - 1 - token)


@triton.jit
def token_of(key, vocab):
    """Return the token of a key."""
    return vocab - 1 - (key & 0xFFFFFFFF)
