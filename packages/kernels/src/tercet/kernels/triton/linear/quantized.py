"""Linear layers that unpack quantized weights on their way to the tensor cores.

The reference is `tercet.kernels.ops.quantized.linear_quantized`. Codes are exact in 16 bits; a block's scale is applied
to its part of the sum, in float32. One row does without tensor cores (`quantized_gemv`). For many rows the weight is
unpacked once beforehand (`dequantize`), instead of once for every tile of rows. If outputs are few, inputs are cut into
splits (`split_k_reduce`). Weights in 8 bits that were made for rounded activations are multiplied in 8 bits where that
is faster (`choices`, `eight_bits`), and weights in 4 bits as the left operand (`turned`).
"""

import torch
import torch.nn.functional as F  # noqa: N812
import triton
import triton.language as tl

from tercet.kernels.ops.quantized import HALF, QuantizedWeight
from tercet.kernels.triton.launch import (
    Tiling,
    cdiv,
    multiplies_from_memory,
    multiprocessors,
    pdl_launch_next,
    pdl_options,
    pdl_wait,
    power_of_two,
    shared_memory,
)
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.choices import Way, rounds, way_of
from tercet.kernels.triton.linear.dequant_bits import (
    E2M1_LEFT,
    columns_of,
    e2m1_number,
    e4m3_number,
    e8m0_scale,
    int4_number,
)
from tercet.kernels.triton.linear.dequantize import TILINGS as UNPACKING
from tercet.kernels.triton.linear.dequantize import dequantize
from tercet.kernels.triton.linear.eight_bits import linear_rounded, rounding_of
from tercet.kernels.triton.linear.quantized_gemv import gemv, supports_gemv
from tercet.kernels.triton.linear.rounding import round_rows
from tercet.kernels.triton.linear.split_k_reduce import add_splits, range_of_split, splits_for
from tercet.kernels.triton.linear.turned import turned_linear

HALF_BYTE: tl.constexpr = tl.constexpr(HALF)

_TALLEST = 64
"""Maximum rows of a tile."""

_TILED_ROWS = {"fp8": 128, "int8": 128, "int4": 64, "mxfp4": 64}
"""Number of rows above which the whole weight is dequantized first: faster on an H200 (mxfp4 is assumed to be like
int4)."""

TILINGS = (Tiling(128, 4), Tiling(64, 4), Tiling(32, 4), Tiling(16, 4), Tiling(64, 8), Tiling(128, 8))
"""Tilings by outputs. The first is in use where it gives enough programs, with or without splits; otherwise one of
`_FEWER`."""

_FEWER = TILINGS[1:3]

_BUSY = 7, 5
"""Grid target: 7 programs for 5 multiprocessors; fewer leave too few loads in flight."""

_ROOM = 128 << 10
"""Bytes of shared memory from which more than two blocks can be in flight without fewer resident programs."""


@triton.jit
def _dot(x_ptr, x_rows, codes, column, m_there, k, acc):
    """Return acc + x[:, column] @ codes.T."""
    there = m_there[:, None] & (column < k)[None, :]
    x = tl.load(x_ptr + x_rows[:, None] + column[None, :], mask=there, other=0.0)
    return tl.dot(x, tl.trans(codes.to(x.dtype)), acc, input_precision="tf32x3")


@triton.jit
def _mxfp4_product(
    x_ptr,
    x_rows,
    m_there,
    codes_ptr,
    scales_ptr,
    output,
    n_there,
    k,
    first,
    last,
    stride_scales,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute `product` with power-of-two scales, which make scaled weights exact."""
    SHAPE: tl.constexpr = [BLOCK_N, BLOCK_K // 2]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    group = tl.arange(0, BLOCK_K // 2 // HALF_BYTE)
    half = tl.arange(0, BLOCK_K // 2)
    codes_at = codes_ptr + output[:, None, None] * (k // 2) + group[None, :, None] * HALF_BYTE
    codes_at += tl.arange(0, HALF_BYTE)[None, None, :]
    scales_at = scales_ptr + output[:, None] * stride_scales + group[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    there = n_there[:, None] & (first + group * 2 * HALF_BYTE < k)[None, :]
    # Scales are bytes, which are too small for asynchronous copies, so they are loaded one iteration ahead.
    soon = tl.load(scales_at + first // (2 * HALF_BYTE), mask=there, other=0)
    for start in tl.range(first, last, BLOCK_K):
        there = n_there[:, None] & (start + group * 2 * HALF_BYTE < k)[None, :]
        codes = tl.load(codes_at + start // 2, mask=there[:, :, None], other=0)
        scale = e8m0_scale(soon, dtype)[:, :, None]
        following = start + BLOCK_K
        there = n_there[:, None] & (following + group * 2 * HALF_BYTE < last)[None, :]
        soon = tl.load(scales_at + following // (2 * HALF_BYTE), mask=there, other=0)
        column = start + half // HALF_BYTE * 2 * HALF_BYTE + half % HALF_BYTE
        low = tl.reshape(e2m1_number(codes, 0, dtype) * scale, SHAPE)
        high = tl.reshape(e2m1_number(codes, 4, dtype) * scale, SHAPE)
        acc = _dot(x_ptr, x_rows, low, column, m_there, k, acc)
        acc = _dot(x_ptr, x_rows, high, column + HALF_BYTE, m_there, k, acc)
    if dtype == tl.bfloat16:
        acc *= E2M1_LEFT
    return acc


@triton.jit
def product(
    x_ptr,
    x_rows,  # [BLOCK_M]: offset of each row's inputs
    m_there,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    output,  # int64 [BLOCK_N]: rows of the weight
    n_there,
    k,
    first,  # a multiple of BLOCK_K
    last,  # a multiple of BLOCK_K, or k
    stride_scales,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiply some rows of inputs by some rows of the weight, columns [first, last): float32 [BLOCK_M, BLOCK_N]."""
    if FORMAT == "mxfp4":
        acc = _mxfp4_product(
            x_ptr, x_rows, m_there, codes_ptr, scales_ptr, output, n_there, k, first, last, stride_scales,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:  # BLOCK_K columns share a scale, which multiplies their partial sum
        scales_at = scales_ptr + output // SCALE_ROWS * stride_scales
        zeros_at = zeros_ptr
        if zeros_ptr is not None:
            zeros_at = zeros_ptr + output // SCALE_ROWS * stride_scales
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        # A scale is no operand of a product, so the compiler does not pipeline its load.
        scale = tl.load(scales_at + first // SCALE_COLUMNS, mask=n_there, other=0.0)
        for start in tl.range(first, last, BLOCK_K):
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            if FORMAT == "int4":
                byte = tl.arange(0, BLOCK_K // 2)
                column = start + byte // HALF_BYTE * 2 * HALF_BYTE + byte % HALF_BYTE
                at = codes_ptr + output[:, None] * (k // 2) + start // 2 + byte[None, :]
                packed = tl.load(at, mask=n_there[:, None] & (column < k)[None, :], other=0)
                zero = tl.load(zeros_at + start // SCALE_COLUMNS, mask=n_there, other=0.0)[:, None]
                low = int4_number(packed & 15, zero, x_ptr.dtype.element_ty)
                high = int4_number(packed >> 4, zero, x_ptr.dtype.element_ty)
                part = _dot(x_ptr, x_rows, low, column, m_there, k, part)
                part = _dot(x_ptr, x_rows, high, column + HALF_BYTE, m_there, k, part)
            else:
                column = start + tl.arange(0, BLOCK_K)
                at = codes_ptr + output[:, None] * k + column[None, :]
                codes = tl.load(at, mask=n_there[:, None] & (column < k)[None, :], other=0)
                if FORMAT == "fp8":
                    codes = e4m3_number(codes, x_ptr.dtype.element_ty)
                part = _dot(x_ptr, x_rows, codes, column, m_there, k, part)
            acc += part * scale[None, :]
            following = start + BLOCK_K
            scale = tl.load(scales_at + following // SCALE_COLUMNS, mask=n_there & (following < last), other=0.0)
    return acc


@triton.jit(do_not_specialize=["m"])
def quantized_linear_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # None with several splits
    out_ptr,  # [m, n], or float32 [splits, m, n]
    m,
    n,
    k,
    stride_x,
    stride_scales,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of the result, for one split of the inputs."""
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_there = row < m
    n_there = output < n
    first, last = range_of_split(k, BLOCK_K)
    pdl_wait(PDL)
    acc = product(
        x_ptr,
        row.to(tl.int64) * stride_x,
        m_there,
        codes_ptr,
        scales_ptr,
        zeros_ptr,
        output.to(tl.int64),
        n_there,
        k,
        first,
        last,
        stride_scales,
        FORMAT,
        SCALE_ROWS,
        SCALE_COLUMNS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    pdl_launch_next(PDL)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + output, mask=n_there, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + (tl.program_id(2).to(tl.int64) * m + row)[:, None] * n + output[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=m_there[:, None] & n_there[None, :])


def linear_quantized(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the linear layer as in the reference, for blocks that `columns_of` supports."""
    return multiply(x, weight, bias, "weights" if supports_gemv(x, weight) else way_of(x, weight))


def multiply(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, way: Way) -> torch.Tensor:
    """Compute the linear layer by one way."""
    if way == "turned":
        return turned_linear(x, weight, bias)
    if rounds(way):
        rounded = round_rows(x.reshape(-1, x.shape[-1]), *rounding_of(weight, way))
        return linear_rounded(rounded, weight, bias, way, x.dtype).view(*x.shape[:-1], -1)
    if supports_gemv(x, weight):
        return gemv(x, weight, bias)
    if x.numel() > _TILED_ROWS[weight.format] * x.shape[-1]:
        return full_linear(x, weight, bias)
    return tiled_linear(x, weight, bias)


def _cut(outputs: int, rows: int, k: int, processors: int) -> tuple[Tiling, int]:
    """Return (tiling of outputs, splits of inputs): the widest with enough programs, or else the smallest in use.

    `rows` is rounded up to whole tiles, so that other row counts rarely need other kernels.
    """
    wanted = cdiv(_BUSY[0] * processors, _BUSY[1])
    for tiling in (TILINGS[0], *_FEWER):
        programs = cdiv(outputs, tiling.block) * cdiv(rows, _TALLEST)
        splits = splits_for(programs, rows, k, wanted)
        if programs * splits >= wanted:
            break
    return tiling, splits


def _stages(block_m: int, block_n: int, room: int, *, split: bool) -> int:
    """Return the pipeline stages; more would reduce resident programs for tall tiles and small shared memory.

    Without splits, three were fastest on an H200.
    """
    if block_m == _TALLEST or room < _ROOM or not split:
        return 3
    return 4 if block_n > _FEWER[0].block else 5


def full_linear(
    x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None, *, tiling: Tiling = UNPACKING[0]
) -> torch.Tensor:
    """Dequantize the whole weight and multiply by it."""
    return F.linear(x, dequantize(weight, x.dtype, tiling=tiling), bias)


def tiled_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    *,
    tiling: Tiling | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Multiply by tiles of up to 64 rows, each of which unpacks the weight; an explicit tiling implies one split."""
    n, k = weight.shape
    columns, block_k = columns_of(weight)
    rows = x.reshape(-1, k)
    m = len(rows)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    block_m = min(_TALLEST, max(16, power_of_two(m)))
    tiles = cdiv(m, block_m)
    if tiling is None:
        tiling, chosen = _cut(n, tiles * block_m, k, multiprocessors(x.device))
        splits = splits or chosen
        if block_m == _TALLEST and tiling == TILINGS[0] and not multiplies_from_memory(x.device):
            tiling = TILINGS[-1]  # 4 warps would run out of registers
    parts = torch.empty(splits, m, n, dtype=torch.float32, device=x.device) if splits and splits > 1 else None
    bias_in, out_in = (bias, out) if parts is None else (None, parts)
    launch(
        quantized_linear_kernel,
        (cdiv(n, tiling.block), tiles, splits or 1),
        (rows, weight.codes, weight.scales, weight.zeros, bias_in, out_in),
        (m, n, k, rows.stride(0), weight.scales.stride(0)),
        FORMAT=weight.format,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=columns,
        BLOCK_M=block_m,
        BLOCK_N=tiling.block,
        BLOCK_K=block_k,
        num_warps=tiling.warps,
        num_stages=_stages(block_m, tiling.block, shared_memory(x.device), split=parts is not None),
        **pdl_options(x.device),
    )
    if parts is not None:
        add_splits(parts, bias, out)
    return out.view(*x.shape[:-1], n)
