"""Mixture of experts for a few tokens with weights in fp8, int8 and int4: GEMVs without sorting.

Each (token, expert) pair reads its expert's rows as `quantized_gemv` reads those of a layer. Two kernels do everything,
including gate and sum. The reference is `tercet.kernels.ops.moe.fused_moe`.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.moe import QuantizedExperts
from tercet.kernels.triton.launch import Tiling, cdiv, pdl_options, pdl_wait
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.dequant_bits import columns_of
from tercet.kernels.triton.linear.gemv import piece_of, store_outputs
from tercet.kernels.triton.linear.quantized_gemv import piece_of_weight, row_sums

TILINGS = (Tiling(4096, 2), Tiling(4096, 4), Tiling(2048, 2), Tiling(2048, 1), Tiling(8192, 4))
"""Tilings by bytes of a weight that a program reads at a time. The first is in use; none is measured."""

_FEW = 16
"""Maximum pairs of token and expert, as in `moe_gemv_quantized`; not measured."""

_SHORTEST = 128
"""Minimum number of elements of a row for which a read is efficient."""

_FORMATS = "fp8", "int8", "int4"


@triton.jit
def scaled_experts_up_kernel(
    x_ptr,  # [tokens, SIZE]
    words_ptr,  # int32 [experts * 2 * outputs, WORDS], gates first
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [experts, 2 * outputs]
    experts_ptr,  # int64 [pairs]
    out_ptr,  # [pairs, outputs]
    outputs,
    share,  # number of pairs of a token
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
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
    """Compute gate * up of some outputs of one pair."""
    pair = tl.program_id(1).to(tl.int64)
    pdl_wait(PDL)
    before = tl.load(experts_ptr + pair) * 2 * outputs  # rows of preceding experts
    scales_at = before // SCALE_ROWS * STRIDE_SCALES
    if zeros_ptr is not None:
        zeros_ptr += scales_at
    sums = row_sums(
        x_ptr + pair // share * SIZE, words_ptr + before * WORDS, scales_ptr + scales_at, zeros_ptr, outputs,
        SIZE, FORMAT, STRIDE_SCALES, SCALE_ROWS, SCALE_COLUMNS, GATE, EVEN, ROWS, GROUPS, PDL,
    )  # fmt: skip
    if bias_ptr is not None:
        bias_ptr += before
    store_outputs(sums, bias_ptr, None, out_ptr + pair * outputs, outputs, ROWS, GATE)


@triton.jit
def scaled_experts_down_kernel(
    x_ptr,  # [tokens * top_k, SIZE]
    words_ptr,  # int32 [experts * outputs, WORDS]
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [experts, outputs]
    experts_ptr,  # int64 [tokens * top_k]
    factors_ptr,  # float32 [tokens * top_k]
    out_ptr,  # [tokens, outputs]
    outputs,
    top_k,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    FORMAT: tl.constexpr,
    STRIDE_SCALES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
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
        before = tl.load(experts_ptr + pair) * outputs
        scales_at = before // SCALE_ROWS * STRIDE_SCALES
        zeros_at = zeros_ptr
        if zeros_ptr is not None:
            zeros_at = zeros_ptr + scales_at
        sums = row_sums(
            x_ptr + pair * SIZE, words_ptr + before * WORDS, scales_ptr + scales_at, zeros_at, outputs,
            SIZE, FORMAT, STRIDE_SCALES, SCALE_ROWS, SCALE_COLUMNS, "", EVEN, ROWS, GROUPS, PDL,
        )  # fmt: skip
        if bias_ptr is not None:
            sums += tl.load(bias_ptr + before + output, mask=there, other=0.0).to(tl.float32)
        total += sums * tl.load(factors_ptr + pair)
    tl.store(out_ptr + token * outputs + output, total.to(out_ptr.dtype.element_ty), mask=there)


def few(experts: torch.Tensor, gate_up: QuantizedExperts, down: QuantizedExperts) -> bool:
    """Return whether `few_tokens` supports this and is faster."""
    both = gate_up.weight, down.weight
    known = all(weight.format in _FORMATS and piece_of(weight.shape[1]) >= _SHORTEST for weight in both)
    return experts.numel() <= _FEW and known


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
    acted = torch.empty(tokens * top_k, size, dtype=x.dtype, device=x.device)
    rows, options = _options(gate_up, tiling)
    launch(
        scaled_experts_up_kernel,
        (cdiv(2 * size, rows), tokens * top_k),
        (x, *_tensors(gate_up), biases[0], chosen, acted),
        (size, top_k),
        GATE=gate,
        **options,
    )
    out = torch.empty_like(x)
    rows, options = _options(down, tiling)
    launch(
        scaled_experts_down_kernel,
        (cdiv(hidden, rows), tokens),
        (acted, *_tensors(down), biases[1], chosen, weights.float().contiguous(), out),
        (hidden, top_k),
        **options,
    )
    return out


def _tensors(given: QuantizedExperts) -> tuple[torch.Tensor | None, ...]:
    return given.weight.codes.view(torch.int32), given.weight.scales, given.weight.zeros


def _options(given: QuantizedExperts, tiling: Tiling) -> tuple[int, dict[str, Any]]:
    """Return (rows of a program, the compile-time constants of a projection)."""
    weight, (_, n, k) = given.weight, given.shape
    rows, groups = piece_of_weight(weight, tiling)
    return rows, {
        "SIZE": k,
        "WORDS": weight.codes.shape[1] // 4,
        "FORMAT": weight.format,
        "STRIDE_SCALES": weight.scales.stride(0),
        "SCALE_ROWS": weight.block[0],
        "SCALE_COLUMNS": columns_of(weight)[0],
        "EVEN": n % rows == 0,
        "ROWS": rows,
        "GROUPS": groups,
        "num_warps": tiling.warps,
        **pdl_options(weight.codes.device),
    }
