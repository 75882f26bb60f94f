"""Mixture of experts for a few tokens with unquantized weights: GEMVs without sorting, as in `moe_gemv_quantized`.

A program takes few outputs and reads long pieces of their rows, as in `linear`. In the second projection it takes them
for all experts of a token at once, so that their loads overlap.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import Gate
from tercet.kernels.triton.launch import cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.gemv import rows_of, store_outputs

_FEW = 16
"""Maximum pairs of token and expert, as in `moe_gemv_quantized`; not measured."""

_ROWS = 4
"""Rows of gate and up that a program reads."""

_DOWN_ROWS = 8
"""Rows of the second projection that a program reads, over a token's experts."""

_LONGEST = 1024
"""Maximum elements of one row that are read at a time."""


@triton.jit
def _sums(x_at, weight_at, there, size, BLOCK: tl.constexpr):
    """Multiply inputs at x_at [PAIRS] by rows of the weight at weight_at [PAIRS, ROWS]: float32 [PAIRS, ROWS]."""
    column = tl.arange(0, BLOCK)
    sums = tl.zeros([weight_at.shape[0], weight_at.shape[1], BLOCK], tl.float32)
    for first in tl.range(0, size, BLOCK):
        at = (first + column)[None, None, :]
        weight = tl.load(weight_at[:, :, None] + at, mask=there[:, :, None] & (at < size), other=0.0)
        x = tl.load(x_at[:, None, None] + at, mask=at < size, other=0.0)
        sums += weight.to(tl.float32) * x.to(tl.float32)
    return tl.sum(sums, 2)


@triton.jit
def full_experts_up_kernel(
    x_ptr,  # [tokens, size]
    weight_ptr,  # [experts, 2 * outputs, size], gates first
    bias_ptr,  # [experts, 2 * outputs]
    experts_ptr,  # int64 [pairs]
    out_ptr,  # [pairs, outputs]
    outputs,
    size,
    share,  # number of pairs of a token
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute gate * up of some outputs of one pair."""
    pair = tl.program_id(1).to(tl.int64)
    row, there = rows_of(outputs, ROWS, GATE)
    pdl_wait(PDL)
    before = tl.load(experts_ptr + pair) * 2 * outputs  # rows of preceding experts
    x_at = x_ptr + pair // share * size + tl.zeros([1], tl.int64)
    sums = _sums(x_at, weight_ptr + ((before + row) * size)[None, :], there[None, :], size, BLOCK)
    pdl_launch_next(PDL)
    if bias_ptr is not None:
        bias_ptr += before
    store_outputs(tl.reshape(sums, [ROWS]), bias_ptr, None, out_ptr + pair * outputs, outputs, ROWS, GATE)


@triton.jit
def full_experts_down_kernel(
    x_ptr,  # [tokens * top_k, size]
    weight_ptr,  # [experts, outputs, size]
    bias_ptr,  # [experts, outputs]
    experts_ptr,  # int64 [tokens * top_k]
    factors_ptr,  # float32 [tokens * top_k]
    out_ptr,  # [tokens, outputs]
    outputs,
    size,
    top_k,
    PAIRS: tl.constexpr,  # top_k or more
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum some outputs of one token over its experts."""
    token, index = tl.program_id(1).to(tl.int64), tl.arange(0, PAIRS)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair, chosen = token * top_k + index, index < top_k
    pdl_wait(PDL)
    expert = tl.load(experts_ptr + pair, mask=chosen, other=0)
    factor = tl.load(factors_ptr + pair, mask=chosen, other=0.0)
    there = chosen[:, None] & (output < outputs)[None, :]
    row = expert[:, None] * outputs + output[None, :]
    own = tl.where(
        chosen, pair, token * top_k
    )  # idle lanes read their own token's row: 0 * NaN of another token would be NaN
    sums = _sums(x_ptr + own * size, weight_ptr + row * size, there, size, BLOCK)
    pdl_launch_next(PDL)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
    total = tl.sum(sums * factor[:, None], 0)
    tl.store(out_ptr + token * outputs + output, total.to(out_ptr.dtype.element_ty), mask=output < outputs)


def few(experts: torch.Tensor) -> bool:
    """Return whether `few_tokens` is faster."""
    return experts.numel() <= _FEW


def few_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    gate: Gate,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
) -> torch.Tensor:
    """Compute `fused_moe` for a few tokens."""
    tokens, top_k = experts.shape
    size, hidden = gate_up.shape[1] // 2, down.shape[1]
    chosen, pairs = experts.contiguous(), power_of_two(top_k)
    pdl = pdl_options(x.device)
    acted = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    launch(
        full_experts_up_kernel,
        (cdiv(2 * size, _ROWS), tokens * top_k),
        (x, gate_up, biases[0], chosen, acted),
        (size, x.shape[1], top_k),
        GATE=gate,
        ROWS=_ROWS,
        BLOCK=_block(x.shape[1]),
        **pdl,
    )
    out, rows = torch.empty_like(x), max(1, _DOWN_ROWS // pairs)
    launch(
        full_experts_down_kernel,
        (cdiv(hidden, rows), tokens),
        (acted, down, biases[1], chosen, weights.float().contiguous(), out),
        (hidden, size, top_k),
        PAIRS=pairs,
        ROWS=rows,
        BLOCK=_block(size),
        **pdl,
    )
    return out


def _block(size: int) -> int:
    """Return the elements of a row of `size` that are read at a time."""
    return min(_LONGEST, power_of_two(size))
