"""Linear layers with 4-bit weights as the left operand: the rows of a product are the outputs.

Hopper's tensor cores read the left operand from registers, where codes are widened, and take any number of columns from
8 on, so one tile widens a weight for up to 128 rows of inputs. In `quantized` widened weights are the right operand,
which goes through shared memory, and a tile has at most 64 rows. The reference is
`tercet.kernels.ops.quantized.linear_quantized`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.quantized import HALF, QuantizedWeight
from tercet.kernels.triton.launch import (
    cdiv,
    multiplies_from_memory,
    multiprocessors,
    pdl_launch_next,
    pdl_options,
    pdl_wait,
    power_of_two,
)
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.dequant_bits import columns_of, int4_number
from tercet.kernels.triton.linear.split_k_reduce import add_splits, range_of_split, splits_for

HALF_BYTE: tl.constexpr = tl.constexpr(HALF)

_MOST_ROWS = 128
"""Maximum rows of inputs of a tile where tensor cores take 64 outputs at once: its sums have 128 registers there."""

_FEW_ROWS = 32
"""Maximum rows on other GPUs, where more would spill registers."""

_OUTPUTS = 128
"""Outputs of a tile."""


@triton.jit(do_not_specialize=["m"])
def turned_linear_kernel(
    x_ptr,
    codes_ptr,  # of int4
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # None with several splits
    out_ptr,  # [m, n], or float32 [splits, m, n]
    m,
    n,
    k,
    stride_x,
    stride_scales,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of the result, for one split of the inputs."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    byte = tl.arange(0, BLOCK_K // 2)
    m_there, n_there = row < m, output < n
    first, last = range_of_split(k, BLOCK_K)
    x_rows = x_ptr + row.to(tl.int64)[:, None] * stride_x
    weight_rows = output.to(tl.int64)
    codes_at = codes_ptr + weight_rows[:, None] * (k // 2) + byte[None, :]
    scales_at, zeros_at = scales_ptr + weight_rows * stride_scales, zeros_ptr + weight_rows * stride_scales
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Scales and zeros are no operands of a product, so the compiler does not pipeline their loads.
    scale = tl.load(scales_at + first // SCALE_COLUMNS, mask=n_there, other=0.0)
    zero = tl.load(zeros_at + first // SCALE_COLUMNS, mask=n_there, other=0.0)
    pdl_wait(PDL)
    for start in tl.range(first, last, BLOCK_K):
        column = start + byte // HALF_BYTE * 2 * HALF_BYTE + byte % HALF_BYTE
        there = n_there[:, None] & (column < k)[None, :]
        packed = tl.load(codes_at + start // 2, mask=there, other=0)
        low = int4_number(packed & 15, zero[:, None], dtype)
        high = int4_number(packed >> 4, zero[:, None], dtype)
        x_there = m_there[:, None] & (column < k)[None, :]
        x_low = tl.load(x_rows + column[None, :], mask=x_there, other=0.0)
        x_high = tl.load(x_rows + column[None, :] + HALF_BYTE, mask=x_there, other=0.0)
        part = tl.dot(low, tl.trans(x_low), input_precision="tf32x3")
        part = tl.dot(high, tl.trans(x_high), part, input_precision="tf32x3")
        acc += part * scale[:, None]
        following = start + BLOCK_K
        soon = n_there & (following < last)
        scale = tl.load(scales_at + following // SCALE_COLUMNS, mask=soon, other=0.0)
        zero = tl.load(zeros_at + following // SCALE_COLUMNS, mask=soon, other=0.0)
    pdl_launch_next(PDL)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + output, mask=n_there, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + (tl.program_id(2).to(tl.int64) * m + row)[None, :] * n + output[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=n_there[:, None] & m_there[None, :])


def supports_turned(weight: QuantizedWeight) -> bool:
    """Return whether `turned_linear` computes a weight: int4 with zeros, and a scale of its own for each output."""
    return weight.format == "int4" and weight.zeros is not None and weight.block[0] == 1 and weight.minimums is None


def turned_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the linear layer as in the reference, for weights that `supports_turned` names."""
    n, k = weight.shape
    columns, block_k = columns_of(weight)
    rows = x.reshape(-1, k)
    m = len(rows)
    most = _MOST_ROWS if multiplies_from_memory(x.device) else _FEW_ROWS
    block_m = min(most, max(16, power_of_two(m)))
    tiles, outputs = cdiv(m, block_m), cdiv(n, _OUTPUTS)
    splits = splits_for(tiles * outputs, tiles * block_m, k, multiprocessors(x.device))
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits > 1 else None
    bias_in, out_in = (bias, out) if parts is None else (None, parts)
    launch(
        turned_linear_kernel,
        (outputs, tiles, splits),
        (rows, weight.codes, weight.scales, weight.zeros, bias_in, out_in),
        (m, n, k, rows.stride(0), weight.scales.stride(0)),
        SCALE_COLUMNS=columns,
        BLOCK_M=block_m,
        BLOCK_N=_OUTPUTS,
        BLOCK_K=block_k,
        num_warps=4 if block_m <= 32 else 8,
        num_stages=3,
        **pdl_options(x.device),
    )
    if parts is not None:
        add_splits(parts, bias, out)
    return out.view(*x.shape[:-1], n)
