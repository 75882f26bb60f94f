"""The numbers that codes of few bits stand for, in as few steps as there are to be had."""

import triton
import triton.language as tl

from tercet.kernels.ops.quantised import HALF, QuantisedWeight


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


def columns_of(weight: QuantisedWeight) -> tuple[int, int]:
    """(columns that share a scale, columns that are computed at once).

    Raises ValueError unless the first are a power of two, at least 32, or all there are.
    """
    columns, k = min(weight.block[1], weight.shape[1]), weight.shape[1]
    if columns < k and (columns & (columns - 1) or columns < 2 * HALF):
        raise ValueError(f"blocks of {columns} columns cannot be computed")
    return columns, 128 if columns >= k else min(128, columns)
