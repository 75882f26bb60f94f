"""What the linear layers of a decode of one token share: what they read, and what becomes of their sums.

An RMS norm before such a layer is a number that all its sums are multiplied by, so that a program finds it on the way,
from inputs that it reads anyway. What rounding the norm's result would change is left out: sums are float32.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.activation import gated

_LONGEST = 2048
"""Numbers that are read at a time of one row of a weight."""

SHORTEST = 256
"""Numbers of one row that are worth a read."""


def piece_of(size: int) -> int:
    """Numbers that are read at a time of a row of `size`: the largest power of two that divides it, within limits."""
    return min(size & -size, _LONGEST)


@triton.jit
def read_input(x_ptr, norm_ptr, at):
    """(inputs, times the weight of the norm if there is one; their squares, without it), float32."""
    x = tl.load(x_ptr + at).to(tl.float32)
    squares = x * x
    if norm_ptr is not None:
        x *= tl.load(norm_ptr + at).to(tl.float32)
    return x, squares


@triton.jit
def rows_of(outputs, ROWS: tl.constexpr, GATE: tl.constexpr):
    """(the rows of the weight that this program takes, which of them there are): with a GATE, gate and up by turns."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = row
    if GATE != "":
        output = row // 2
        row = output + row % 2 * outputs
    return row, output < outputs


@triton.jit
def store_outputs(sums, bias_ptr, residual_ptr, out_ptr, outputs, ROWS: tl.constexpr, GATE: tl.constexpr):
    """The sums of `rows_of` with their biases, gate * up through a GATE, with what is to be added to outputs."""
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
