"""The linear layers of a decode of one token: a weight is read once, as fast as memory gives it.

For one row a matrix product is a sum over each row of the weight, and no matter of tensor cores. A program takes a few
outputs and reads long pieces of their rows; what it reads first, it reads while the kernel before it still ends.
More rows go to torch, whose library knows them better. The references are `torch.nn.functional.linear`, and with it
`tercet.kernels.ops.activation.silu_and_mul`.
"""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from tercet.kernels.triton.activation import silu_and_mul
from tercet.kernels.triton.launch import await_previous, early_start, release_next

_TILE = 4096
"""Numbers of a weight that a program reads at a time, of each half where there are two: the fastest on an H200."""

_LONGEST = 2048
_SHORTEST = 256
"""Numbers that are read at a time of one row."""


@triton.jit
def row_linear_kernel(
    x_ptr,  # [SIZE]
    weight_ptr,  # [outputs, SIZE], or [2 * outputs, SIZE] where GATED, gates first
    bias_ptr,
    out_ptr,  # [outputs]
    outputs,
    SIZE: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS outputs; where GATED, silu(gate) * up of as many."""
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = output < outputs
    column = tl.arange(0, BLOCK)
    at = weight_ptr + output.to(tl.int64)[:, None] * SIZE + column[None, :]
    up_at = at + tl.cast(outputs, tl.int64) * SIZE
    weight = tl.load(at, mask=there[:, None], other=0.0)
    if GATED:
        up_weight = tl.load(up_at, mask=there[:, None], other=0.0)
    await_previous(EARLY)
    x = tl.load(x_ptr + column).to(tl.float32)[None, :]
    sums = weight.to(tl.float32) * x
    if GATED:
        up_sums = up_weight.to(tl.float32) * x
    for first in tl.range(BLOCK, SIZE, BLOCK):
        weight = tl.load(at + first, mask=there[:, None], other=0.0)
        if GATED:
            up_weight = tl.load(up_at + first, mask=there[:, None], other=0.0)
        x = tl.load(x_ptr + first + column).to(tl.float32)[None, :]
        sums += weight.to(tl.float32) * x
        if GATED:
            up_sums += up_weight.to(tl.float32) * x
    release_next(EARLY)
    dtype = out_ptr.dtype.element_ty
    out = _biased(tl.sum(sums, 1), bias_ptr, output, there)
    if GATED:
        gate = out.to(dtype).to(tl.float32)
        up = _biased(tl.sum(up_sums, 1), bias_ptr, outputs + output, there)
        out = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32) * up.to(dtype).to(tl.float32)
    tl.store(out_ptr + output, out.to(dtype), mask=there)


@triton.jit
def _biased(out, bias_ptr, output, there):
    if bias_ptr is not None:
        out += tl.load(bias_ptr + output, mask=there, other=0.0).to(tl.float32)
    return out


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The product x @ weight.T + bias: [rows, size], [outputs, size] -> [rows, outputs]."""
    if not _is_row(x, weight):
        return F.linear(x, weight, bias)
    return _launch(x, weight, bias, len(weight), gated=False)


def gated_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The same through silu_and_mul: [rows, size], [2 * outputs, size] -> [rows, outputs]."""
    if not _is_row(x, weight):
        return silu_and_mul(F.linear(x, weight, bias))
    return _launch(x, weight, bias, len(weight) // 2, gated=True)


def _is_row(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel knows this: one row, of a size of whole pieces that are worth reading, on 16 bits."""
    one = x.ndim == 2 and len(x) == 1 and x.is_contiguous() and weight.is_contiguous()
    return one and x.dtype == weight.dtype and x.element_size() == 2 and _piece(x.shape[1]) >= _SHORTEST


def _piece(size: int) -> int:
    """The largest power of two, of at most _LONGEST, that divides a size."""
    return min(size & -size, _LONGEST)


def _launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, outputs: int, *, gated: bool
) -> torch.Tensor:
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    size = x.shape[1]
    block = _piece(size)
    rows = _TILE // block
    row_linear_kernel[(triton.cdiv(outputs, rows),)](
        x,
        weight,
        bias,
        out,
        outputs,
        SIZE=size,
        GATED=gated,
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        **early_start(x.device),
    )
    return out
