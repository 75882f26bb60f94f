"""Mixture of experts for a few tokens with mxfp4 weights: each (token, expert) pair reads the weights for itself.

There is no sorting and no use of tensor cores: a program takes a few outputs and sums products, as in `quantized_gemv`;
a thread handles 32 columns that share a scale. Two kernels do everything, including gate and sum. The reference is
`tercet.kernels.ops.moe.fused_moe`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.moe import QuantizedExperts
from tercet.kernels.triton.activation import gated
from tercet.kernels.triton.launch import Tiling, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.linear.dequant_bits import e8m0_scale

TILINGS = (Tiling(16, 4), Tiling(8, 4), Tiling(8, 2), Tiling(16, 2), Tiling(32, 4), Tiling(32, 8))
"""Tilings by rows of gate and up that a program reads; half as many in the second projection. The first is in use."""

_FEW = 16
"""Maximum pairs of token and expert. More pairs share experts, whose weights should be read once for all of them.
This is estimated from the bytes and instructions of both variants, not measured."""

_LONGEST = 32
"""Maximum groups of 32 columns that are read at a time from a row."""

_STEP: tl.constexpr = tl.constexpr(2.0**63)
"""Factor of the inputs: bits of e2m1 in their place in a float32 are 2^126 too small; half of the exponent goes here.
"""


@triton.jit
def _products(words, x_ptr, there, LOWEST: tl.constexpr):
    """Sum products of inputs with codes at bits LOWEST + 0, 8, 16 and 24 of words [ROWS, GROUPS, 4, 1].

    The sums [ROWS, GROUPS] are _STEP times too small. A code is shifted to the top of a float32, then right
    arithmetically: its sign stays, and its other bits become the lowest bits of the exponent and the highest of the
    mantissa.
    """
    ROWS: tl.constexpr = words.shape[0]
    GROUPS: tl.constexpr = words.shape[1]
    at = tl.arange(0, 4) * 8 + LOWEST
    bits = (words << (28 - at)[None, None, None, :] >> 6) & -0x7E400000
    number = tl.reshape(bits.to(tl.float32, bitcast=True), [ROWS, GROUPS, 16])
    column = tl.arange(0, GROUPS)[:, None] * 32 + tl.arange(0, 16)[None, :] + LOWEST * 4
    x = tl.load(x_ptr + column, mask=there[:, None], other=0.0).to(tl.float32) * _STEP
    return tl.sum(number * x[None, :, :], 2)


@triton.jit
def _sums(
    x_ptr,  # [k]
    words_ptr,  # int32 [rows, k / 8]
    scales_ptr,  # uint8 [rows, k / 32]
    row,  # int64 [ROWS]
    row_there,
    groups,  # number of groups of 32 columns
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Multiply one row of inputs by some rows of the weight: float32 [ROWS]."""
    group = tl.arange(0, GROUPS)
    piece = group[:, None] * 4 + tl.arange(0, 4)[None, :]
    words_at = words_ptr + (row * groups * 4)[:, None, None, None] + piece[None, :, :, None]
    words_there = row_there[:, None, None, None]
    scales_at = scales_ptr + (row * groups)[:, None] + group[None, :]
    sums = tl.zeros([ROWS, GROUPS], tl.float32)
    soon = tl.load(words_at, mask=words_there & (group < groups)[None, :, None, None], other=0)
    for first in tl.range(0, groups, GROUPS):
        words = soon
        following = first + GROUPS
        soon_there = words_there & (following + group < groups)[None, :, None, None]
        soon = tl.load(words_at + following * 4, mask=soon_there, other=0)
        inside = first + group < groups
        bits = tl.load(scales_at + first, mask=row_there[:, None] & inside[None, :], other=0)
        x_at = x_ptr + first * 32
        part = _products(words, x_at, inside, 0) + _products(words, x_at, inside, 4)
        sums += part * e8m0_scale(bits, tl.float32)
    return tl.sum(sums, 1) * _STEP


@triton.jit
def experts_up_kernel(
    x_ptr,  # [tokens, k]
    words_ptr,  # of [experts * 2 * outputs, k]
    scales_ptr,
    bias_ptr,  # [experts, 2 * outputs]
    experts_ptr,  # int64 [pairs]
    out_ptr,  # [pairs, outputs]
    outputs,
    groups,  # number of groups of 32 columns of k
    share,  # number of pairs of a token
    GATE: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute gate * up of some outputs of one pair."""
    pair = tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    local = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = local // 2
    there = output < outputs
    pdl_wait(PDL)
    row = tl.load(experts_ptr + pair) * 2 * outputs + output + local % 2 * outputs
    if bias_ptr is not None:  # before the sums, so that its latency overlaps
        bias = tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
    sums = _sums(x_ptr + pair // share * groups * 32, words_ptr, scales_ptr, row, there, groups, ROWS, GROUPS)
    pdl_launch_next(PDL)
    if bias_ptr is not None:
        sums += bias
    gate, up = tl.split(tl.reshape(sums.to(dtype).to(tl.float32), [ROWS // 2, 2]))
    output = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    out = gated(gate, up, GATE, dtype)
    tl.store(out_ptr + pair * outputs + output, out.to(dtype), mask=output < outputs)


@triton.jit
def experts_down_kernel(
    x_ptr,  # [tokens * top_k, k]
    words_ptr,  # of [experts * outputs, k]
    scales_ptr,
    bias_ptr,  # [experts, outputs]
    experts_ptr,  # int64 [tokens * top_k]
    factors_ptr,  # float32 [tokens * top_k]
    out_ptr,  # [tokens, outputs]
    outputs,
    groups,  # number of groups of 32 columns of k
    top_k,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum some outputs of one token over its experts."""
    token = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = output < outputs
    total = tl.zeros([ROWS], tl.float32)
    pdl_wait(PDL)
    for pair in tl.range(token * top_k, (token + 1) * top_k):
        row = tl.load(experts_ptr + pair) * outputs + output
        factor = tl.load(factors_ptr + pair)
        if bias_ptr is not None:
            bias = tl.load(bias_ptr + row, mask=there, other=0.0).to(tl.float32)
        sums = _sums(x_ptr + pair * groups * 32, words_ptr, scales_ptr, row, there, groups, ROWS, GROUPS)
        if bias_ptr is not None:
            sums += bias
        total += sums * factor
    pdl_launch_next(PDL)
    tl.store(out_ptr + token * outputs + output, total.to(out_ptr.dtype.element_ty), mask=there)


def few(experts: torch.Tensor, gate_up: QuantizedExperts, down: QuantizedExperts) -> bool:
    """Return whether `few_tokens` supports this and is faster."""
    return experts.numel() <= _FEW and gate_up.weight.format == down.weight.format == "mxfp4"


def few_tokens(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: QuantizedExperts,
    down: QuantizedExperts,
    *,
    gate: Gate,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    tiling: Tiling = TILINGS[0],
) -> torch.Tensor:
    """Compute `fused_moe` for a few tokens."""
    tokens, top_k = experts.shape
    size, hidden = gate_up.shape[1] // 2, down.shape[1]
    chosen = experts.contiguous()
    pdl = pdl_options(x.device)
    acted = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    experts_up_kernel[triton.cdiv(2 * size, tiling.block), tokens * top_k](
        x,
        gate_up.weight.codes.view(torch.int32),
        gate_up.weight.scales,
        biases[0],
        chosen,
        acted,
        size,
        x.shape[1] // 32,
        top_k,
        GATE=gate,
        ROWS=tiling.block,
        GROUPS=_groups(x.shape[1]),
        num_warps=tiling.warps,
        **pdl,
    )
    out = torch.empty_like(x)
    experts_down_kernel[triton.cdiv(hidden, tiling.block // 2), tokens](
        acted,
        down.weight.codes.view(torch.int32),
        down.weight.scales,
        biases[1],
        chosen,
        weights.float().contiguous(),
        out,
        hidden,
        size // 32,
        top_k,
        ROWS=tiling.block // 2,
        GROUPS=_groups(size),
        num_warps=tiling.warps,
        **pdl,
    )
    return out


def _groups(k: int) -> int:
    """Return the groups of a row of k columns that are read at a time."""
    return min(_LONGEST, power_of_two(k // 32))
