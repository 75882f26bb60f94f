"""GEMV with quantized weights, which are read once, at the speed of memory.

As in `linear`, a program takes a few outputs and sums products. The bottleneck is the conversion of codes, so most take
one instruction: bits are moved to their place in a float32, and the missing power of two is multiplied into the inputs.
A thread has the same columns of all rows of its program, and so reads and prepares their inputs once; to make Triton
choose that layout, rows and columns are one dimension wherever memory is read. The reference is
`tercet.kernels.ops.quantized.linear_quantized`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.quantized import QuantizedWeight
from tercet.kernels.triton.launch import (
    Tiling,
    multiprocessors,
    pdl_launch_next,
    pdl_options,
    pdl_wait,
    power_of_two,
)
from tercet.kernels.triton.linear.dequant_bits import columns_of
from tercet.kernels.triton.linear.gemv import SHORTEST, piece_of, rows_of, store_outputs

TILINGS = (Tiling(4096, 2), Tiling(4096, 4), Tiling(8192, 4), Tiling(2048, 2), Tiling(2048, 1), Tiling(8192, 2))
"""Tilings by bytes of a weight that a program reads at a time. The first is in use if it gives enough programs,
otherwise the second.

Fewer warps for the same bytes mean more rows for each thread and fewer programs."""

_BUSY = 16
"""Warps of a multiprocessor that saturate memory."""

_GROUP = 8
"""Bytes of a row that a thread reads at once."""

_E4M3_STEP: tl.constexpr = tl.constexpr(2.0**60)
"""Factor of the inputs for e4m3: bits of e4m3 in their place in a float32 are 2^120 too small; half of the exponent
goes here."""

_WHOLE_STEP: tl.constexpr = tl.constexpr(2.0**56)
"""Factor of the inputs for integers: an integer in the lowest bits of a float32 is 2^149 too small; a part goes here.
"""

_WHOLE_LEFT: tl.constexpr = tl.constexpr(2.0**73)
"""Remaining factor of the sums."""


@triton.jit
def _whole_products(words, x, LOWEST: tl.constexpr, BITS: tl.constexpr):
    """Multiply integer codes of BITS bits at bits LOWEST + 0, 8, 16 and 24 of words by inputs [GROUPS, 8].

    Words are [ROWS * GROUPS, 2, 1]; the sums [ROWS, GROUPS] are _WHOLE_LEFT times too small. A code alone in a float32
    is exactly 2^(place - 149) times itself below bit 24, because subnormal numbers are spaced like those with exponent
    bit 23.
    """
    SHAPE: tl.constexpr = [words.shape[0] // x.shape[0], x.shape[0], 8]
    at = (LOWEST + tl.arange(0, 4) * 8)[None, None, :]
    place = at % 24
    bits = words.to(tl.uint32, bitcast=True) >> (at - place) & (((1 << BITS) - 1) << place)
    number = tl.reshape(bits.to(tl.float32, bitcast=True), SHAPE)
    missing = 20 - (LOWEST + tl.arange(0, 8) % 4 * 8) % 24
    x = x * ((1 << missing).to(tl.float32) * _WHOLE_STEP)[None, :]
    return tl.sum(number * x[None, :, :], 2)


@triton.jit
def _e4m3_products(words, x):
    """Multiply codes of e4m3 likewise; the sums are _E4M3_STEP times too small."""
    SHAPE: tl.constexpr = [words.shape[0] // x.shape[0], x.shape[0], 8]
    left = (24 - tl.arange(0, 4) * 8)[None, None, :]
    bits = (words << left >> 4) & -0x78100000  # keep the sign, and 7 bits below the top of the exponent
    number = tl.reshape(bits.to(tl.float32, bitcast=True), SHAPE)
    return tl.sum(number * (x * _E4M3_STEP)[None, :, :], 2)


@triton.jit
def _group_sums(words, x_ptr, zero, left, FORMAT: tl.constexpr, GROUPS: tl.constexpr, RAGGED: tl.constexpr):
    """Sum the products of each group of 8 bytes with the inputs from x_ptr on, for `left` groups: [ROWS, GROUPS].

    A zero is subtracted from the sum, times the sum of inputs, which all rows share, instead of from each code. It
    covers only 8 or 16 columns, so cancellation loses no more than the summation itself.
    """
    group = tl.arange(0, GROUPS)
    column = group * 8
    if FORMAT == "int4":
        column = group // 2 * 32 + group % 2 * 8
    at = x_ptr + column[:, None] + tl.arange(0, 8)[None, :]
    there = (group < left if RAGGED else tl.full([GROUPS], 1, tl.int1))[:, None]
    x = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if FORMAT == "int4":
        upper = tl.load(at + 16, mask=there, other=0.0).to(tl.float32)
        sums = _whole_products(words, x, 0, 4) + _whole_products(words, upper, 4, 4)
        sums = sums * _WHOLE_LEFT - zero * tl.sum(x + upper, 1)[None, :]
    elif FORMAT == "int8":  # with their highest bits flipped, codes are 128 larger and not negative
        sums = _whole_products(words ^ -0x7F7F7F80, x, 0, 8) * _WHOLE_LEFT - 128.0 * tl.sum(x, 1)[None, :]
    else:
        sums = _e4m3_products(words, x)
    return sums


@triton.jit
def _elements(
    outputs,
    stride,
    HEIGHT: tl.constexpr,
    GROUPS_EACH: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Return the offsets of a program's groups in a tensor whose elements stand for HEIGHT rows of a weight.

    The result has two parts, so that constants reduce the address arithmetic: an int64 of the program, and offsets to
    add, [ROWS * GROUPS], or [GROUPS] where all rows share them.
    """
    first = tl.program_id(0).to(tl.int64) * (ROWS if GATE == "" else ROWS // 2)
    row = tl.arange(0, ROWS * GROUPS) // GROUPS
    if HEIGHT == 1 and GATE == "":
        start, further = first * stride, row * stride
    elif HEIGHT == 1:
        start, further = first * stride, row // 2 * stride + (row % 2 * outputs).to(tl.int64) * stride
    elif HEIGHT % ROWS == 0 and GATE == "":
        start, further = first // HEIGHT * stride, tl.zeros([GROUPS], tl.int32)
    else:
        row = first + (row if GATE == "" else row // 2 + row % 2 * outputs)
        start, further = first * 0, row // HEIGHT * stride
    group = tl.arange(0, further.shape[0]) % GROUPS
    return start, further + group // GROUPS_EACH


@triton.jit
def _rows_there(
    outputs, PLACES: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr
):
    """Return a mask of `PLACES` offsets of `_elements` whose rows exist."""
    there = tl.full([PLACES], 1, tl.int1)
    if not EVEN and PLACES == ROWS * GROUPS:
        row = tl.program_id(0) * ROWS + tl.arange(0, PLACES) // GROUPS
        there = row < (outputs if GATE == "" else 2 * outputs)
    return there


@triton.jit
def _left(there, left, GROUPS: tl.constexpr, RAGGED: tl.constexpr):
    """Mask the groups beyond the `left` ones of a row, if it is RAGGED."""
    if RAGGED:
        there = there & (tl.arange(0, there.shape[0]) % GROUPS < left)
    return there


@triton.jit
def row_sums(
    x_ptr,  # [SIZE]
    words_ptr,
    scales_ptr,
    zeros_ptr,
    outputs,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    STRIDE_SCALES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply a row of inputs by the ROWS rows of this program: float32 [ROWS]. Parameters are those of the kernel."""
    COLUMNS: tl.constexpr = 16 if FORMAT == "int4" else 8  # of a group
    EACH: tl.constexpr = SCALE_COLUMNS // COLUMNS  # groups that share a scale
    PIECES: tl.constexpr = SIZE // COLUMNS
    RAGGED: tl.constexpr = PIECES % GROUPS > 0
    start, further = _elements(outputs, PIECES, 1, 1, GATE, ROWS, GROUPS)
    words_at = words_ptr + start * 2 + (further[:, None] * 2 + tl.arange(0, 2)[None, :])[:, :, None]
    words_there = _rows_there(outputs, ROWS * GROUPS, GATE, EVEN, ROWS, GROUPS)
    start, further = _elements(outputs, STRIDE_SCALES, SCALE_ROWS, EACH, GATE, ROWS, GROUPS)
    PLACES: tl.constexpr = further.shape[0]
    there, sums = _rows_there(outputs, PLACES, GATE, EVEN, ROWS, GROUPS), tl.zeros([ROWS, GROUPS], tl.float32)
    soon = tl.load(words_at, mask=words_there[:, None, None], other=0)
    if zeros_ptr is not None:  # needed as early as the codes
        zero_soon = tl.load(zeros_ptr + start + further, mask=there, other=0.0)
    pdl_wait(PDL)
    for first in tl.range(0, PIECES, GROUPS):
        words, left, following = soon, PIECES - first, first + GROUPS
        words_soon = _left(words_there, left - GROUPS, GROUPS, RAGGED) & (following < PIECES)
        soon = tl.load(words_at + following * 2, mask=words_soon[:, None, None], other=0)
        if SCALE_COLUMNS == SIZE and zeros_ptr is None:
            sums += _group_sums(words, x_ptr + first * COLUMNS, None, left, FORMAT, GROUPS, RAGGED)
        else:
            inside = _left(there, left, GROUPS, RAGGED)
            scale = tl.load(scales_ptr + start + first // EACH + further, mask=inside, other=0.0)
            zero = None
            if zeros_ptr is not None:
                zero = tl.reshape(zero_soon, [PLACES // GROUPS, GROUPS])
                inside = _left(there, left - GROUPS, GROUPS, RAGGED) & (following < PIECES)
                zero_soon = tl.load(zeros_ptr + start + following // EACH + further, mask=inside, other=0.0)
            part = _group_sums(words, x_ptr + first * COLUMNS, zero, left, FORMAT, GROUPS, RAGGED)
            sums += part * tl.reshape(scale, [PLACES // GROUPS, GROUPS])
    pdl_launch_next(PDL)
    out = tl.sum(sums, 1)
    if SCALE_COLUMNS == SIZE and zeros_ptr is None:
        row, there = rows_of(outputs, ROWS, GATE)
        out *= tl.load(scales_ptr + row.to(tl.int64) // SCALE_ROWS * STRIDE_SCALES, mask=there, other=0.0)
    if FORMAT == "fp8":
        out *= _E4M3_STEP
    return out


@triton.jit
def quantized_gemv_kernel(
    x_ptr,  # [SIZE]
    words_ptr,  # int32 [outputs, SIZE / codes in 4 bytes], or of [2 * outputs, ...] with a GATE, gates first
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,  # [outputs], added to the outputs
    out_ptr,  # [outputs]
    outputs,
    SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
    STRIDE_SCALES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    GATE: tl.constexpr,
    EVEN: tl.constexpr,  # every program has all of its rows
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,  # number of groups of 8 bytes read at a time from one row
    PDL: tl.constexpr,
):
    """Compute the outputs of ROWS rows of the weight. A thread reads a group at once; its columns share a scale."""
    out = row_sums(
        x_ptr, words_ptr, scales_ptr, zeros_ptr, outputs,
        SIZE, FORMAT, STRIDE_SCALES, SCALE_ROWS, SCALE_COLUMNS, GATE, EVEN, ROWS, GROUPS, PDL,
    )  # fmt: skip
    store_outputs(out, bias_ptr, residual_ptr, out_ptr, outputs, ROWS, GATE)


def supports_gemv(x: torch.Tensor, weight: QuantizedWeight) -> bool:
    """Return whether `gemv` supports this: one row, of a size of whole, long enough pieces, and not mxfp4."""
    k = weight.shape[1]
    return weight.format != "mxfp4" and x.numel() == k and x.is_contiguous() and piece_of(k) >= SHORTEST


def piece_of_weight(weight: QuantizedWeight, tiling: Tiling) -> tuple[int, int]:
    """Return (rows of a program, groups of each row that it reads at a time)."""
    each = _GROUP * 2 if weight.format == "int4" else _GROUP
    groups = min(32 * tiling.warps, power_of_two(weight.shape[1] // each + 1) // 2)
    return tiling.block // _GROUP // groups, groups


def _tiling(weight: QuantizedWeight, processors: int) -> Tiling:
    rows, _ = piece_of_weight(weight, TILINGS[0])
    warps = triton.cdiv(weight.shape[0], rows) * TILINGS[0].warps
    return TILINGS[0] if warps >= _BUSY * processors else TILINGS[1]


def gemv(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    gate: Gate | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Multiply one row [..., k] by a weight, gated as in `project`, plus the residual: [..., n] or half of that."""
    n, k = weight.shape
    columns, _ = columns_of(weight)
    outputs = n // 2 if gate else n
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    tiling = tiling or _tiling(weight, multiprocessors(x.device))
    rows, groups = piece_of_weight(weight, tiling)
    quantized_gemv_kernel[(triton.cdiv(n, rows),)](
        x,
        weight.codes.view(torch.int32),
        weight.scales,
        weight.zeros,
        bias,
        residual,
        out,
        outputs,
        SIZE=k,
        FORMAT=weight.format,
        STRIDE_SCALES=weight.scales.stride(0),
        SCALE_ROWS=weight.block[0],
        SCALE_COLUMNS=columns,
        GATE=gate or "",
        EVEN=n % rows == 0,
        ROWS=rows,
        GROUPS=groups,
        num_warps=tiling.warps,
        **pdl_options(x.device),
    )
    return out
