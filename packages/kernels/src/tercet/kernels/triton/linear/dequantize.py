"""Dequantization of whole weights. The reference is `tercet.kernels.ops.quantized.dequantize`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.quantized import HALF, QuantizedWeight
from tercet.kernels.triton.launch import Tiling, cdiv, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.dequant_bits import e2m1_number, e4m3_number, e8m0_scale, int4_number

TILINGS = (Tiling(256, 4), Tiling(128, 4), Tiling(128, 2), Tiling(256, 8), Tiling(512, 8))
"""Tilings by groups of HALF bytes, each of which shares a scale. The first is in use."""

HALF_BYTE: tl.constexpr = tl.constexpr(HALF)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,  # [n, k]
    n,
    k,
    stride_scales,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Dequantize some groups of some rows."""
    PACKED: tl.constexpr = 2 if FORMAT == "int4" or FORMAT == "mxfp4" else 1  # noqa: PLR1714 - Triton has no "in"
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[None, :]
    first = group * HALF_BYTE
    inside = (row < n) & (first < k // PACKED)
    scale_at = row // SCALE_ROWS * stride_scales + first * PACKED // SCALE_COLUMNS
    scale = tl.load(scales_ptr + scale_at, mask=inside, other=0)[:, :, None]
    if FORMAT == "mxfp4":
        scale = e8m0_scale(scale, tl.float32)
    byte = first[:, :, None] + tl.arange(0, HALF_BYTE)[None, None, :]
    there = (row < n)[:, :, None] & (byte < k // PACKED)
    codes = tl.load(codes_ptr + row[:, :, None] * (k // PACKED) + byte, mask=there, other=0)
    out_at = out_ptr + row[:, :, None] * k + byte + first[:, :, None] * (PACKED - 1)
    dtype = out_ptr.dtype.element_ty
    if FORMAT == "int4":
        zero = tl.load(zeros_ptr + scale_at, mask=inside, other=0.0)[:, :, None]
        upper = int4_number(codes >> 4, zero, tl.float32)
        tl.store(out_at + HALF_BYTE, (upper * scale).to(dtype), mask=there)
        number = int4_number(codes & 15, zero, tl.float32)
    elif FORMAT == "mxfp4":
        upper = e2m1_number(codes, 4, tl.float32)
        tl.store(out_at + HALF_BYTE, (upper * scale).to(dtype), mask=there)
        number = e2m1_number(codes, 0, tl.float32)
    elif FORMAT == "fp8":
        number = e4m3_number(codes, tl.float32)
    else:
        number = codes.to(tl.float32)
    tl.store(out_at, (number * scale).to(dtype), mask=there)


def dequantize(weight: QuantizedWeight, dtype: torch.dtype, *, tiling: Tiling = TILINGS[0]) -> torch.Tensor:
    """Return the weight [n, k] in `dtype`."""
    if weight.minimums is not None:
        raise ValueError("weights with minimums are computed on a CPU only")
    n, k = weight.shape
    out = torch.empty(n, k, dtype=dtype, device=weight.codes.device)
    groups = cdiv(weight.codes.shape[1], HALF)
    block = min(tiling.block, power_of_two(groups))
    rows = tiling.block // block
    launch(
        dequantize_kernel,
        (cdiv(n, rows), cdiv(groups, block)),
        (weight.codes, weight.scales, weight.zeros, out),
        (n, k, weight.scales.stride(0)),
        FORMAT=weight.format,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=min(weight.block[1], k),
        ROWS=rows,
        GROUPS=block,
        num_warps=tiling.warps,
    )
    return out
