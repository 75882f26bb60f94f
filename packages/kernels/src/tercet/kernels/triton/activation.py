"""Gated activations. The references are in `tercet.kernels.ops.activation`."""

from typing import Literal

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import LIMIT, SLOPE, Gate
from tercet.kernels.triton.launch import cdiv, pdl_launch_next, pdl_options, pdl_wait
from tercet.kernels.triton.launch_cache import launch

_BLOCK = 1024
_LIMIT: tl.constexpr = tl.constexpr(LIMIT)
_SLOPE: tl.constexpr = tl.constexpr(SLOPE)
_ALL: tl.constexpr = tl.constexpr(tl.PropagateNan.ALL)
"""Propagate NaN in min and max, as torch and the interpreter do; by default a GPU returns the bound."""


@triton.jit
def acted(gate, KIND: tl.constexpr):
    """Apply the activation KIND, a `Gate` or "gelu", to float32 gates."""
    if KIND == "silu":
        out = gate * tl.sigmoid(gate)
    elif KIND == "gelu_tanh":  # 0.5 * (1 + tanh(z)) is sigmoid(2 * z)
        out = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif KIND == "clamped":
        gate = tl.minimum(gate, _LIMIT, propagate_nan=_ALL)
        out = gate * tl.sigmoid(gate * _SLOPE)
    else:
        out = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
    return out


@triton.jit
def gated(gate, up, KIND: tl.constexpr, dtype: tl.constexpr):
    """Multiply float32 ups by the activated gates, which are rounded to a dtype as in an unfused model."""
    if KIND == "clamped":
        up = tl.minimum(tl.maximum(up, -_LIMIT, propagate_nan=_ALL), _LIMIT, propagate_nan=_ALL)
        up = (up + 1).to(dtype).to(tl.float32)
    return acted(gate, KIND).to(dtype).to(tl.float32) * up


@triton.jit
def gated_kernel(x_ptr, out_ptr, size, KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute act(gate) * up for one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < size
    pdl_wait(PDL)
    gate = tl.load(x_ptr + row * 2 * size + column, mask=there, other=0.0)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=there, other=0.0)
    pdl_launch_next(PDL)
    out = gated(gate.to(tl.float32), up.to(tl.float32), KIND, gate.dtype)
    tl.store(out_ptr + row * size + column, out.to(gate.dtype), mask=there)


def act_and_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """See `tercet.kernels.ops.activation.act_and_mul`."""
    return _launch(x, gate)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """See `tercet.kernels.ops.activation.silu_and_mul`."""
    return _launch(x, "silu")


def gelu_and_mul(x: torch.Tensor, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """See `tercet.kernels.ops.activation.gelu_and_mul`."""
    return _launch(x, "gelu" if approximate == "none" else "gelu_tanh")


def _launch(x: torch.Tensor, kind: str) -> torch.Tensor:
    x = x.contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    pdl = pdl_options(x.device)
    grid = (out.numel() // size, cdiv(size, _BLOCK))
    launch(gated_kernel, grid, (x, out), (size,), KIND=kind, BLOCK=_BLOCK, **pdl)
    return out
