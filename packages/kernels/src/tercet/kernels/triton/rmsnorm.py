"""RMS normalization, with an optional fused residual addition. The reference is `tercet.kernels.ops.rmsnorm`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch

_ELEMENTS = 4096
"""Elements of a program; one program takes several short rows."""


@triton.jit(do_not_specialize=["rows"])
def rmsnorm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    rows,
    inner,
    stride_outer,
    stride_inner,
    eps,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalize some rows; row i of x begins at i // inner * stride_outer + i % inner * stride_inner.

    All other tensors are contiguous.
    """
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    there = (row < rows)[:, None] & (column < SIZE)[None, :]
    x_at = x_ptr + (row // inner * stride_outer + row % inner * stride_inner)[:, None] + column[None, :]
    at = row[:, None] * SIZE + column[None, :]
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    x = tl.load(x_at, mask=there, other=0.0)
    wide = x.to(tl.float32)
    if residual_ptr is not None:
        total = (wide + tl.load(residual_ptr + at, mask=there, other=0.0).to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + at, total, mask=there)
        wide = total.to(tl.float32)
    pdl_launch_next(PDL)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)[:, None]
    out = rounded_for(normed, x.dtype, weight_ptr) * weight[None, :]
    tl.store(out_ptr + at, out.to(x.dtype), mask=there)


@triton.jit
def rounded_for(normed, dtype: tl.constexpr, weight_ptr):
    """Return the factor of a norm's weight, float32, rounded to x's dtype if the weight has the same dtype."""
    if weight_ptr.dtype.element_ty == dtype:
        normed = normed.to(dtype).to(tl.float32)
    return normed


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalize x [..., size] of at most three dimensions; strides are arbitrary except within a row."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, out, out, eps)
    return out


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalize x + residual; `residual` must be contiguous."""
    out, total = torch.empty_like(residual), torch.empty_like(residual)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
) -> None:
    shape, strides = x.shape, x.stride()
    if strides[-1] != 1 or len(shape) > 3 or (residual is not None and not residual.is_contiguous()):
        raise ValueError(f"rows of {list(shape)} with strides {strides} cannot be normalized")
    size = shape[-1]
    rows = x.numel() // size
    inner, stride_outer, stride_inner = 1, strides[-2], 0
    if len(shape) == 3:
        inner, stride_outer, stride_inner = shape[1], strides[0], strides[1]
    block = power_of_two(size)
    together = max(1, min(16, _ELEMENTS // block, power_of_two(rows)))
    launch(
        rmsnorm_kernel,
        (cdiv(rows, together),),
        (x, residual, weight, out, total),
        (rows, inner, stride_outer, stride_inner, eps),
        SIZE=size,
        ROWS=together,
        BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
        **pdl_options(x.device),
    )
