"""Weights in full again. The reference is `tercet.kernels.ops.quantised.dequantise`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.quantised import HALF, QuantisedWeight
from tercet.kernels.triton.codes import e4m3_number, int4_number

_GROUPS = 256
"""Of HALF bytes of one row, that a program reads: each shares a scale."""

HALF_BYTE: tl.constexpr = tl.constexpr(HALF)


@triton.jit
def dequantise_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,  # [n, k]
    k,
    stride_scales,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Some groups of one row."""
    PACKED: tl.constexpr = 2 if FORMAT == "int4" else 1
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    byte = tl.arange(0, HALF_BYTE)[None, :]
    scale_at = row // SCALE_ROWS * stride_scales + group * HALF_BYTE * PACKED // SCALE_COLUMNS
    first = group * HALF_BYTE
    inside = first < k // PACKED
    scale = tl.load(scales_ptr + scale_at, mask=inside, other=0.0)[:, None]
    there = first[:, None] + byte < k // PACKED
    codes = tl.load(codes_ptr + row * (k // PACKED) + first[:, None] + byte, mask=there, other=0)
    out_at = out_ptr + row * k + PACKED * first[:, None] + byte
    dtype = out_ptr.dtype.element_ty
    if FORMAT == "int4":
        zero = tl.load(zeros_ptr + scale_at, mask=inside, other=0.0)[:, None]
        upper = int4_number(codes >> 4, zero, tl.float32)
        tl.store(out_at + HALF_BYTE, (upper * scale).to(dtype), mask=there)
        number = int4_number(codes & 15, zero, tl.float32)
    elif FORMAT == "fp8":
        number = e4m3_number(codes, tl.float32)
    else:
        number = codes.to(tl.float32)
    tl.store(out_at, (number * scale).to(dtype), mask=there)


def dequantise(weight: QuantisedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weight in full, [n, k]."""
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    dequantise_kernel[n, triton.cdiv(weight.codes.shape[1], _GROUPS * HALF)](
        weight.codes,
        weight.scales,
        weight.zeros,
        out,
        k,
        weight.scales.stride(0),
        FORMAT=weight.format,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=min(weight.block[1], k),
        GROUPS=_GROUPS,
    )
    return out
