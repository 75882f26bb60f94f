"""One row through a linear layer whose weights are in few bits: they are read once, as fast as memory gives them.

As in `linear`, a program takes a few outputs and sums up products. What takes time is to make numbers of codes, so that
takes few steps: bits are put where a float32 has them, and what this adds or multiplies by is made up for in the inputs
and the zero. The reference is `tercet.kernels.ops.quantised.linear_quantised`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.quantised import QuantisedWeight
from tercet.kernels.triton.codes import columns_of
from tercet.kernels.triton.launch import Tiling, await_previous, early_start, release_next
from tercet.kernels.triton.one_row import SHORTEST, piece_of, rows_of, store_outputs

TILINGS = (Tiling(8192, 4), Tiling(4096, 2), Tiling(4096, 4), Tiling(8192, 8), Tiling(16384, 4), Tiling(16384, 8))
"""Weights that a program reads at a time. The first is the one in use."""

_WHOLE = 0x4B000000
"""The bits of 2^23, a float32 that is as much more as the 23 bits below them say.

It is an argument of the kernel, for an instruction that masks bits and sets others has room for one constant.
"""

_ZERO: tl.constexpr = tl.constexpr(8388608.0)
"""2^23."""

_E4M3_STEP: tl.constexpr = tl.constexpr(2.0**60)
"""The bits of an e4m3 where a float32 has them mean 2^120 less: half of that is put into the inputs."""


@triton.jit
def _products(words, x, zero, whole, FORMAT: tl.constexpr, LOWEST: tl.constexpr):
    """Of the codes at bits LOWEST + 0, 8, 16 and 24 of words [ROWS, GROUPS, 2, 1], the numbers times 8 inputs."""
    SHAPE: tl.constexpr = [words.shape[0], words.shape[1], 8]
    at = (LOWEST + tl.arange(0, 4) * 8)[None, None, None, :]
    if FORMAT == "fp8":
        bits = (words << (24 - at) >> 4) & -0x78100000  # the sign stays, and 7 bits below where an exponent begins
        number = tl.reshape(bits.to(tl.float32, bitcast=True), SHAPE)
        x = x * _E4M3_STEP
    else:  # a code stays at its place in half a word, which x makes up for
        MASK: tl.constexpr = 15 if FORMAT == "int4" else 255
        if FORMAT == "int8":
            words = words ^ -0x7F7F7F80  # 128 more
            zero = tl.full([1, 1, 1, 1], 128, tl.float32)
        place = at % 16
        half = words.to(tl.uint32, bitcast=True) >> (at - place)
        bits = (half & (MASK << place)) | whole
        number = tl.reshape(bits.to(tl.float32, bitcast=True) - (_ZERO + zero * (1 << place)), SHAPE)
        x = x * (1.0 / (1 << (LOWEST + tl.arange(0, 8) % 2 * 8)))[None, None, :]
    return number * x


@triton.jit
def _group_sums(words, x_ptr, zero, whole, FORMAT: tl.constexpr, GROUPS: tl.constexpr):
    """Of each group of 8 bytes, the sum of products with the inputs from x_ptr on: [ROWS, GROUPS]."""
    group = tl.arange(0, GROUPS)
    column = group * 8
    if FORMAT == "int4":
        column = group // 2 * 32 + group % 2 * 8
    at = x_ptr + (column[:, None] + tl.arange(0, 8)[None, :])[None, :, :]
    sums = tl.sum(_products(words, tl.load(at).to(tl.float32), zero, whole, FORMAT, 0), 2)
    if FORMAT == "int4":
        sums += tl.sum(_products(words, tl.load(at + 16).to(tl.float32), zero, whole, FORMAT, 4), 2)
    return sums


@triton.jit(do_not_specialize=["whole"])
def quantised_row_kernel(
    x_ptr,  # [SIZE]
    words_ptr,  # int32 [outputs, SIZE / codes in 4 bytes], or of [2 * outputs, ...] with a GATE, gates first
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,  # [outputs], added to them
    out_ptr,  # [outputs]
    outputs,
    stride_scales,
    whole,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # of 8 bytes, read at a time of one row
    EARLY: tl.constexpr,
):
    """The outputs of ROWS rows of the weight. A group is what a thread reads at once; its columns share a scale."""
    COLUMNS: tl.constexpr = 16 if FORMAT == "int4" else 8  # of a group
    row, there = rows_of(outputs, ROWS, GATE)
    group = tl.arange(0, GROUPS)
    piece = (group[:, None] * 2 + tl.arange(0, 2)[None, :])[None, :, :, None]
    words_at = words_ptr + row.to(tl.int64)[:, None, None, None] * (SIZE // COLUMNS * 2) + piece
    words_there = there[:, None, None, None]
    scales_row = row.to(tl.int64)[:, None] // SCALE_ROWS * stride_scales
    sums = tl.zeros([ROWS, GROUPS], tl.float32)
    soon = tl.load(words_at, mask=words_there, other=0)
    if zeros_ptr is not None:  # they are needed as early as the codes
        scale_at = scales_row + (group * COLUMNS // SCALE_COLUMNS)[None, :]
        zero_soon = tl.load(zeros_ptr + scale_at, mask=there[:, None], other=0.0)
    await_previous(EARLY)
    for first in tl.range(0, SIZE // COLUMNS, GROUPS):
        words = soon
        following = first + GROUPS
        soon = tl.load(words_at + following * 2, mask=words_there & (following < SIZE // COLUMNS), other=0)
        x_at = x_ptr + first * COLUMNS
        if SCALE_COLUMNS == SIZE and zeros_ptr is None:
            sums += _group_sums(words, x_at, None, whole, FORMAT, GROUPS)
        else:
            scale_at = scales_row + ((first + group) * COLUMNS // SCALE_COLUMNS)[None, :]
            scale = tl.load(scales_ptr + scale_at, mask=there[:, None], other=0.0)
            zero = None
            if zeros_ptr is not None:
                zero = zero_soon[:, :, None, None]
                scale_at = scales_row + ((following + group) * COLUMNS // SCALE_COLUMNS)[None, :]
                inside = there[:, None] & (following < SIZE // COLUMNS)
                zero_soon = tl.load(zeros_ptr + scale_at, mask=inside, other=0.0)
            sums += _group_sums(words, x_at, zero, whole, FORMAT, GROUPS) * scale
    release_next(EARLY)
    out = tl.sum(sums, 1)
    if SCALE_COLUMNS == SIZE and zeros_ptr is None:
        out *= tl.load(scales_ptr + row.to(tl.int64) // SCALE_ROWS * stride_scales, mask=there, other=0.0)
    if FORMAT == "fp8":
        out *= _E4M3_STEP
    store_outputs(out, bias_ptr, residual_ptr, out_ptr, outputs, ROWS, GATE)


def is_row(x: torch.Tensor, weight: QuantisedWeight) -> bool:
    """Whether `row_linear` knows this: one row, of a size of whole pieces that are worth reading. It knows no mxfp4."""
    k = weight.shape[1]
    return weight.format != "mxfp4" and x.numel() == k and x.is_contiguous() and piece_of(k) >= SHORTEST


def row_linear(
    x: torch.Tensor,
    weight: QuantisedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gate: Gate | None = None,
    tiling: Tiling = TILINGS[0],
) -> torch.Tensor:
    """One row [..., k] times a weight, gated as in `project`, plus the residual: [..., n] or half of that."""
    n, k = weight.shape
    columns, _ = columns_of(weight)
    outputs = n // 2 if gate else n
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    piece = piece_of(k)
    rows = tiling.block // piece
    quantised_row_kernel[(triton.cdiv(n, rows),)](
        x,
        weight.codes.view(torch.int32),
        weight.scales,
        weight.zeros,
        bias,
        residual,
        out,
        outputs,
        weight.scales.stride(0),
        _WHOLE,
        SIZE=k,
        FORMAT=weight.format,
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=columns,
        GATE=gate or "",
        ROWS=rows,
        GROUPS=piece // (16 if weight.format == "int4" else 8),
        num_warps=tiling.warps,
        **early_start(x.device),
    )
    return out
