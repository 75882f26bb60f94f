"""Conversion of quantized codes to floating point by bit operations, in as few instructions as possible."""

import triton
import triton.language as tl

from tercet.kernels.ops.quantized import HALF, QuantizedWeight

E2M1_LEFT: tl.constexpr = tl.constexpr(2.0**64)
"""Remaining factor of a sum over weights of e2m1 numbers and e8m0 scales in bfloat16."""


@triton.jit
def e4m3_number(bits, dtype: tl.constexpr):
    """Convert bits of e4m3 (no NaN), exactly: moved into a 16-bit float, they are a power of two too small."""
    wide = bits.to(tl.int8, bitcast=True).to(tl.int16)
    if dtype == tl.bfloat16:
        number = ((wide << 4) & -0x7810).to(tl.bfloat16, bitcast=True) * tl.full([], 2.0**120, tl.bfloat16)
    else:
        number = ((wide << 7) & -0x4080).to(tl.float16, bitcast=True).to(dtype) * tl.full([], 256.0, dtype)
    return number


@triton.jit
def int4_number(codes, zero, dtype: tl.constexpr):
    """Convert codes 0 to 15 minus the zero, exactly: in 16 bits, by adding a power of two and subtracting it."""
    if dtype == tl.float32:
        number = codes.to(tl.float32) - zero
    else:
        POWER: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        number = (codes.to(tl.int16) | BITS).to(dtype, bitcast=True) - (zero + POWER).to(dtype)
    return number


@triton.jit
def e2m1_number(packed, LOWEST: tl.constexpr, dtype: tl.constexpr):
    """Convert codes of e2m1 at bits LOWEST to LOWEST + 3, exactly; in bfloat16 the results are 2**-126 times too small.

    A code is shifted to the top, so that its sign bit is that of 16 bits, then shifted right arithmetically, so that
    its other bits become the lowest bits of the exponent and the highest of the mantissa.
    """
    wide = packed.to(tl.int16) << (12 - LOWEST)
    if dtype == tl.bfloat16:
        number = ((wide >> 6) & -0x7E40).to(tl.bfloat16, bitcast=True)
    else:
        number = ((wide >> 3) & -0x7200).to(tl.float16, bitcast=True).to(dtype) * tl.full([], 16384.0, dtype)
    return number


@triton.jit
def e8m0_scale(bits, dtype: tl.constexpr):
    """Convert e8m0 to powers of two; in bfloat16 times 2**62, for `e2m1_number`: see E2M1_LEFT.

    In bfloat16 a scale is at most 2**65, and below 2**-62 the smallest numbers lose bits.
    """
    if dtype == tl.bfloat16:
        scale = ((bits.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)
    else:
        scale = (bits.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


def columns_of(weight: QuantizedWeight) -> tuple[int, int]:
    """Return (columns that share a scale, columns computed at once).

    Raises ValueError for minimums, and unless the former are all columns, or a power of two of at least 32 (of codes in
    8 bits, 16).
    """
    if weight.minimums is not None:
        raise ValueError("weights with minimums are computed on a CPU only")
    columns, k = min(weight.block[1], weight.shape[1]), weight.shape[1]
    if weight.format == "mxfp4":
        return columns, 128
    if columns < k and (columns & (columns - 1) or columns < (2 if weight.format == "int4" else 1) * HALF):
        raise ValueError(f"blocks of {columns} columns cannot be computed")
    return columns, 128 if columns >= k else min(128, columns)
