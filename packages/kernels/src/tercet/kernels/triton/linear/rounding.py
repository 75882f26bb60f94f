"""Activations rounded to 8 bits, with the norm before them, and sums of products scaled after them.

The definition is `tercet.kernels.ops.rounded`. A program has a whole row, whose largest element it needs.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.projection import Norm
from tercet.kernels.ops.quantized import EightBits
from tercet.kernels.ops.rounded import LARGEST, LEAST, RoundedRows
from tercet.kernels.ops.store_kv import E4M3
from tercet.kernels.triton.launch import cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.fp8 import e4m3_bits
from tercet.kernels.triton.rmsnorm import rounded_for

_LEAST: tl.constexpr = tl.constexpr(LEAST)
_WHOLE: tl.constexpr = tl.constexpr(1.5 * 2.0**23)
"""Added to a float32 below 2**22 and subtracted again, it rounds to an integer, ties to even."""

_SUMS = 1024
"""Sums of a row that a program scales."""


@triton.jit(do_not_specialize=["rows"])
def round_rows_kernel(
    x_ptr,
    residual_ptr,  # [rows, SIZE], added to x
    weight_ptr,  # [SIZE], of a norm of the sum
    codes_ptr,  # uint8 or int8 [rows, SIZE]
    scales_ptr,  # float32 [SIZE / WIDTH, rows]
    total_ptr,  # [rows, SIZE], the sum
    rows,
    stride,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,  # columns that share a scale
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE or more
    GROUP: tl.constexpr,  # BLOCK if a row has one scale, else WIDTH
    PDL: tl.constexpr,
):
    """Round one row, after an optional sum and norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = column < SIZE
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_ptr + row * stride + column, mask=there, other=0.0)
    wide = x.to(tl.float32)
    if residual_ptr is not None:
        total = (wide + tl.load(residual_ptr + row * SIZE + column, mask=there, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * SIZE + column, total, mask=there)
        wide = total.to(tl.float32)
    pdl_launch_next(PDL)
    if weight_ptr is not None:
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
        wide = (rounded_for(normed, x.dtype, weight_ptr) * weight).to(x.dtype).to(tl.float32)
    groups = tl.reshape(wide, [BLOCK // GROUP, GROUP])
    largest = tl.maximum(tl.max(tl.abs(groups), 1), _LEAST)
    top = tl.full([BLOCK // GROUP], LARGEST, tl.float32)
    steps = tl.reshape(groups * tl.div_rn(top, largest)[:, None], [BLOCK])
    if codes_ptr.dtype.element_ty == tl.uint8:
        codes = e4m3_bits(steps)
    else:
        codes = (tl.minimum(tl.maximum(steps, -LARGEST), LARGEST) + _WHOLE - _WHOLE).to(tl.int8)
    tl.store(codes_ptr + row * SIZE + column, codes, mask=there)
    group = tl.arange(0, BLOCK // GROUP)
    scales = tl.div_rn(largest, top) + tl.sum(groups * 0.0, 1)
    tl.store(scales_ptr + group * rows + row, scales, mask=group * WIDTH < SIZE)


@triton.jit
def scale_sums_kernel(
    sums_ptr,  # float32 or int32 [rows, n]
    row_scales_ptr,  # float32 [rows]
    output_scales_ptr,  # float32 [n]
    bias_ptr,
    out_ptr,
    n,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scale the sums of one block of one row, and add the bias."""
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = column < n
    scales = tl.load(output_scales_ptr + column, mask=there, other=0.0)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=there, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    sums = tl.load(sums_ptr + row * n + column, mask=there, other=0).to(tl.float32)
    out = sums * tl.load(row_scales_ptr + row) * scales
    pdl_launch_next(PDL)
    if bias_ptr is not None:
        out += bias
    tl.store(out_ptr + row * n + column, out.to(out_ptr.dtype.element_ty), mask=there)


def round_rows(x: torch.Tensor, kind: EightBits, width: int) -> RoundedRows:
    """Compute `tercet.kernels.ops.rounded.round_rows` of rows whose elements are adjacent."""
    return _round(x, None, None, kind, width)[0]


def round_normed(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, kind: EightBits, width: int
) -> tuple[RoundedRows, torch.Tensor]:
    """Return (the rounded norm of x + residual, x + residual); without a residual, of x alone."""
    return _round(x, residual, norm, kind, width)


def _round(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, kind: EightBits, width: int
) -> tuple[RoundedRows, torch.Tensor]:
    (rows, size), device = x.shape, x.device
    if x.stride(1) != 1 or (residual is not None and not residual.is_contiguous()):
        raise ValueError(f"rows of {list(x.shape)} with strides {x.stride()} cannot be rounded")
    block = power_of_two(size)
    codes = torch.empty(rows, size, dtype=torch.uint8 if kind == "fp8" else torch.int8, device=device)
    scales = torch.empty(size // width, rows, dtype=torch.float32, device=device)
    total = x if residual is None else torch.empty_like(residual)
    weight, eps = norm or (None, 0.0)
    launch(
        round_rows_kernel,
        (rows,),
        (x, residual, weight, codes, scales, total),
        (rows, x.stride(0), eps),
        SIZE=size,
        WIDTH=width,
        LARGEST=LARGEST[kind],
        BLOCK=block,
        GROUP=block if width == size else width,
        num_warps=8 if block >= 4096 else 4,
        **pdl_options(device),
    )
    return RoundedRows(codes.view(E4M3) if kind == "fp8" else codes, scales.t()), total


def scale_sums(
    sums: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return sums [rows, n] times scales [rows, 1] of rows and scales [n, 1] of a weight, plus a bias, in `dtype`."""
    rows, n = sums.shape
    out = torch.empty(rows, n, dtype=dtype, device=sums.device)
    launch(
        scale_sums_kernel,
        (cdiv(n, _SUMS), rows),
        (sums, scales, weight, bias, out),
        (n,),
        BLOCK=_SUMS,
        num_warps=4,
        **pdl_options(sums.device),
    )
    return out
