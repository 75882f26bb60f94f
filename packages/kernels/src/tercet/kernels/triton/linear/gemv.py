"""Shared parts of GEMV kernels (linear layers of one token): loads of inputs, and stores of outputs.

An RMS norm before such a layer is one factor of all sums, so a program computes it from the inputs that it reads
anyway. Sums are float32; the rounding of the norm's result is left out.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.activation import gated
from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait

_LONGEST = 2048
"""Maximum number of elements of a weight's row that are read at a time."""

SHORTEST = 256
"""Minimum number of elements of a row for which a read is efficient."""


def piece_of(size: int) -> int:
    """Return the elements read at a time from a row of `size`: the largest power of two that divides it, clamped."""
    return min(size & -size, _LONGEST)


@triton.jit
def read_input(x_ptr, norm_ptr, at):
    """Return (inputs, multiplied by the norm's weight if there is one; squares of the plain inputs), float32."""
    x = tl.load(x_ptr + at).to(tl.float32)
    squares = x * x
    if norm_ptr is not None:
        x *= tl.load(norm_ptr + at).to(tl.float32)
    return x, squares


@triton.jit
def row_products(
    x_ptr, norm_ptr, weight_ptr, row, there, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Return the sums of some rows of a weight [rows, SIZE], of which the first pieces are read before `pdl_wait`."""
    column = tl.arange(0, BLOCK)
    at = weight_ptr + row.to(tl.int64)[:, None] * SIZE + column[None, :]
    weight = tl.load(at, mask=there[:, None], other=0.0)
    pdl_wait(PDL)
    x, squares = read_input(x_ptr, norm_ptr, column)
    sums = weight.to(tl.float32) * x[None, :]
    for first in tl.range(BLOCK, SIZE, BLOCK):
        weight = tl.load(at + first, mask=there[:, None], other=0.0)
        x, more = read_input(x_ptr, norm_ptr, first + column)
        sums += weight.to(tl.float32) * x[None, :]
        squares += more
    pdl_launch_next(PDL)
    out = tl.sum(sums, 1)
    if norm_ptr is not None:
        out *= tl.rsqrt(tl.sum(squares, 0) / SIZE + eps)
    return out


@triton.jit
def rows_of(outputs, ROWS: tl.constexpr, GATE: tl.constexpr):
    """Return (the weight's rows of this program, a mask of those that exist); with a GATE, gate and up alternate."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = row
    if GATE != "":
        output = row // 2
        row = output + row % 2 * outputs
    return row, output < outputs


@triton.jit
def store_outputs(sums, bias_ptr, residual_ptr, out_ptr, outputs, ROWS: tl.constexpr, GATE: tl.constexpr):
    """Store the sums of `rows_of` plus biases, with a GATE as gate * up, plus the residual."""
    dtype = out_ptr.dtype.element_ty
    row, there = rows_of(outputs, ROWS, GATE)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
    out = sums.to(dtype).to(tl.float32)
    if GATE != "":
        gate, up = tl.split(tl.reshape(out, [ROWS // 2, 2]))
        out = gated(gate, up, GATE, dtype).to(dtype).to(tl.float32)
        row, there = rows_of(outputs, ROWS // 2, "")
    if residual_ptr is not None:
        out += tl.load(residual_ptr + row, mask=there, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(dtype), mask=there)
