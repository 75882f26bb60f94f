"""GEMV: one row through a linear layer, at the speed of memory.

For one row, a matrix product is a sum over each row of the weight, without tensor cores. A program takes a few outputs
and reads long pieces of their rows; its first read overlaps the end of the preceding kernel (PDL).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.projection import Norm
from tercet.kernels.triton.launch import pdl_options
from tercet.kernels.triton.linear.gemv import SHORTEST, piece_of, row_products, rows_of, store_outputs


class Piece(NamedTuple):
    """Part of a weight that a program reads at a time: rows (of each half, with a gate) and columns."""

    rows: int = 4
    columns: int = 1024


_PIECES = {(6144, 4096): Piece(rows=8), (4096, 4096): Piece(rows=2), (4096, 14336): Piece(rows=8, columns=512)}
"""Pieces by outputs and inputs that are faster on an H200: the shapes of Llama-3.1-8B, measured within its decode."""


@triton.jit
def gemv_kernel(
    x_ptr,  # [SIZE]
    norm_ptr,  # [SIZE], the weight of a norm of x
    weight_ptr,  # [outputs, SIZE], or [2 * outputs, SIZE] with a GATE, gates first
    bias_ptr,
    residual_ptr,  # [outputs], added to the outputs
    out_ptr,  # [outputs]
    outputs,
    eps,
    SIZE: tl.constexpr,
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the outputs of ROWS rows of the weight."""
    row, there = rows_of(outputs, ROWS, GATE)
    out = row_products(x_ptr, norm_ptr, weight_ptr, row, there, eps, SIZE, BLOCK, PDL)
    store_outputs(out, bias_ptr, residual_ptr, out_ptr, outputs, ROWS, GATE)


def supports_gemv(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `gemv` supports this: one row of 16-bit numbers, of a size of whole, long enough pieces."""
    if x.ndim != 2 or x.shape[0] != 1:
        return False
    plain = x.is_contiguous() and weight.is_contiguous() and x.dtype == weight.dtype
    return plain and x.element_size() == 2 and piece_of(x.shape[1]) >= SHORTEST


def piece_for(outputs: int, size: int) -> tuple[int, int]:
    """Return the (rows, columns) that a program reads at a time, of each half with a gate."""
    piece = _PIECES.get((outputs, size), Piece())
    block = min(piece_of(size), piece.columns)
    return piece.rows * piece.columns // block, block


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gate: Gate | None = None,
) -> torch.Tensor:
    """Return x [1, size] @ weight.T + bias, after the norm, gated as in `project`, plus the residual."""
    size, outputs = x.shape[1], len(weight) // 2 if gate else len(weight)
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    rows, block = piece_for(outputs, size)
    rows *= 2 if gate else 1
    gemv_kernel[(triton.cdiv(len(weight), rows),)](
        x,
        norm.weight if norm else None,
        weight,
        bias,
        residual,
        out,
        outputs,
        norm.eps if norm else 0.0,
        SIZE=size,
        GATE=gate or "",
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        **pdl_options(x.device),
    )
    return out
