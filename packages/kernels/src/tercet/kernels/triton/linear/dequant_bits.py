"""The numbers that codes of few bits stand for, in as few steps as there are to be had."""

import triton
import triton.language as tl

from tercet.kernels.ops.quantized import HALF, QuantizedWeight

E2M1_LEFT: tl.constexpr = tl.constexpr(2.0**64)
"""What is left to multiply a sum by whose weights are e2m1 numbers and e8m0 scales in bfloat16."""


@triton.jit
def e4m3_number(bits, dtype: tl.constexpr):
    """Of bits of e4m3 that are no NaN, exactly: where a type of 16 bits has them, they mean a power of two less."""
    wide = bits.to(tl.int8, bitcast=True).to(tl.int16)
    if dtype == tl.bfloat16:
        number = ((wide << 4) & -0x7810).to(tl.bfloat16, bitcast=True) * tl.full([], 2.0**120, tl.bfloat16)
    else:
        number = ((wide << 7) & -0x4080).to(tl.float16, bitcast=True).to(dtype) * tl.full([], 256.0, dtype)
    return number


@triton.jit
def int4_number(codes, zero, dtype: tl.constexpr):
    """Of codes 0 to 15 less the zero, exactly: in 16 bits a power of two is put before a code and taken off."""
    if dtype == tl.float32:
        number = codes.to(tl.float32) - zero
    else:
        POWER: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        BITS: tl.constexpr = 0x4300 if dtype == tl.bfloat16 else 0x6400
        number = (codes.to(tl.int16) | BITS).to(dtype, bitcast=True) - (zero + POWER).to(dtype)
    return number


@triton.jit
def e2m1_number(packed, LOWEST: tl.constexpr, dtype: tl.constexpr):
    """Of codes of e2m1 at bits LOWEST to LOWEST + 3, exactly: in bfloat16 2**-126 times what they mean.

    The sign of a code is put where that of 16 bits is and comes along to the right, where the other bits become a
    mantissa's highest and an exponent's lowest.
    """
    wide = packed.to(tl.int16) << (12 - LOWEST)
    if dtype == tl.bfloat16:
        number = ((wide >> 6) & -0x7E40).to(tl.bfloat16, bitcast=True)
    else:
        number = ((wide >> 3) & -0x7200).to(tl.float16, bitcast=True).to(dtype) * tl.full([], 16384.0, dtype)
    return number


@triton.jit
def e8m0_scale(bits, dtype: tl.constexpr):
    """The powers of two of e8m0; in bfloat16 2**62 times them, for `e2m1_number`: see E2M1_LEFT.

    There a scale is at most 2**65, and below 2**-62 the least numbers lose bits.
    """
    if dtype == tl.bfloat16:
        scale = ((bits.to(tl.int16) + 62) << 7).to(tl.bfloat16, bitcast=True)
    else:
        scale = (bits.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    return scale


def columns_of(weight: QuantizedWeight) -> tuple[int, int]:
    """(columns that share a scale, columns that are computed at once).

    Raises ValueError unless the first are a power of two, at least 32, or all there are.
    """
    columns, k = min(weight.block[1], weight.shape[1]), weight.shape[1]
    if weight.format == "mxfp4":
        return columns, 128
    if columns < k and (columns & (columns - 1) or columns < 2 * HALF):
        raise ValueError(f"blocks of {columns} columns cannot be computed")
    return columns, 128 if columns >= k else min(128, columns)
