"""Mixture of experts as two grouped GEMMs. The reference is `tercet.kernels.ops.moe.fused_moe`.

Weights are unquantized or quantized, in the forms of `tercet.kernels.ops.moe.ExpertWeights`. Pairs of token and expert
are sorted by expert into whole tiles (`moe_align`); tiles past the last one exit at once. Few pairs use kernels that
need no sorting (`moe_gemv`, `moe_gemv_quantized`, `moe_gemv_scaled`). If experts have many pairs each, quantized
weights are dequantized once, some experts at a time, instead of once for every tile.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.activation import Gate, squared_relu
from tercet.kernels.ops.moe import ExpertBiases, ExpertWeights
from tercet.kernels.triton.activation import act_and_mul
from tercet.kernels.triton.launch import cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.dequant_bits import columns_of
from tercet.kernels.triton.linear.dequantize import dequantize
from tercet.kernels.triton.linear.quantized import product
from tercet.kernels.triton.moe import moe_gemv, moe_gemv_quantized, moe_gemv_scaled
from tercet.kernels.triton.moe.moe_align import moe_align

_FULL_ROWS = 96
"""Average pairs of an expert from which its weights are dequantized first: an estimate.

By tiles a layer of gpt-oss-20b took 2.8 ms for 1,024 tokens on an H100; at the rate of `dequantize` on an H200 its
weights are dequantized in 0.6 ms."""

_FULL_BYTES = 256 << 20
"""Memory for dequantized weights, unless one expert needs more."""

_TALL_ROWS = 256
"""Average pairs of an expert from which tiles have 128 rows, in 16 bits; not measured."""


@triton.jit
def _full_product(
    x_ptr,
    x_rows,
    m_there,
    weight_ptr,
    output,
    n_there,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute `product` with an unquantized weight."""
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, k, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        inside = column < k
        x = tl.load(x_ptr + x_rows[:, None] + column[None, :], mask=m_there[:, None] & inside[None, :], other=0.0)
        weight_at = weight_ptr + output[None, :] * k + column[:, None]
        weight = tl.load(weight_at, mask=inside[:, None] & n_there[None, :], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="tf32x3")
    return acc


@triton.jit(do_not_specialize=["pairs", "first", "last"])
def grouped_gemm_kernel(
    x_ptr,
    weight_ptr,  # [experts, n, k], or the codes of [experts * n, k]
    scales_ptr,
    zeros_ptr,
    bias_ptr,  # [experts, n]
    out_ptr,  # [pairs, n]
    pairs_ptr,  # int64 [tiles * BLOCK_M]: the pair in each row of each tile; values past the last pair mark empty rows
    experts_ptr,  # int64 [tiles]; past the last tile, the number of experts
    factors_ptr,  # float32 [pairs]
    pairs,
    first,  # experts [first, last) are computed; weights begin with the first
    last,
    n,
    k,
    share,  # number of pairs that read the same row of x
    stride_scales,
    FORMAT: tl.constexpr,  # "full", or the format of the codes
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute out[pair] = factor * (weight[expert] @ x[pair // share] + bias) for one tile of pairs and outputs."""
    pdl_wait(PDL)
    expert = tl.load(experts_ptr + tl.program_id(1))
    if (expert >= first) & (expert < last):
        pair = tl.load(pairs_ptr + tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M))
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        m_there = pair < pairs
        n_there = output < n
        x_rows = pair // share * k
        row = (expert - first) * n + output
        if FORMAT == "full":
            acc = _full_product(x_ptr, x_rows, m_there, weight_ptr, row, n_there, k, BLOCK_M, BLOCK_N, BLOCK_K)
        else:
            acc = product(
                x_ptr, x_rows, m_there, weight_ptr, scales_ptr, zeros_ptr, row, n_there, k, 0, k, stride_scales,
                FORMAT, SCALE_ROWS, SCALE_COLUMNS, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        pdl_launch_next(PDL)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + expert * n + output, mask=n_there, other=0.0).to(tl.float32)[None, :]
        if factors_ptr is not None:
            acc *= tl.load(factors_ptr + pair, mask=m_there, other=0.0)[:, None]
        out_at = out_ptr + pair[:, None] * n + output[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=m_there[:, None] & n_there[None, :])


def fused_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    *,
    gate: Gate | None = "silu",
    biases: ExpertBiases | None = None,
) -> torch.Tensor:
    """Compute the mixture as in the reference, for quantized blocks that `columns_of` supports."""
    if not all(given.is_contiguous() for given in (x, gate_up, down) if isinstance(given, torch.Tensor)):
        raise ValueError("a mixture of experts needs contiguous inputs and weights")
    tokens, top_k = experts.shape
    added = biases or (None, None)
    few = None if gate is None else _few_tokens(experts, gate_up, down)
    if few is not None:
        return few(x, weights, experts, gate_up, down, gate=gate, biases=added)
    each = tokens * top_k // len(gate_up)
    block = 128 if each >= _TALL_ROWS and x.element_size() == 2 else min(64, max(16, power_of_two(each)))
    pairs, expert_of = moe_align(experts, len(gate_up), block)
    hidden = _grouped_gemm(x, gate_up, added[0], pairs, expert_of, None, tokens * top_k, top_k, block)
    acted = squared_relu(hidden) if gate is None else act_and_mul(hidden, gate)
    factors = weights.float().contiguous()
    out = _grouped_gemm(acted, down, added[1], pairs, expert_of, factors, tokens * top_k, 1, block)
    return out.view(tokens, top_k, -1).sum(1)


def _few_tokens(
    experts: torch.Tensor, gate_up: ExpertWeights, down: ExpertWeights
) -> Callable[..., torch.Tensor] | None:
    """Return the kernels that need no sorting, where they are faster."""
    if isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor):
        return moe_gemv.few_tokens if moe_gemv.few(experts) else None
    if isinstance(gate_up, torch.Tensor) or isinstance(down, torch.Tensor):
        return None
    if moe_gemv_quantized.few(experts, gate_up, down):
        return moe_gemv_quantized.few_tokens
    return moe_gemv_scaled.few_tokens if moe_gemv_scaled.few(experts, gate_up, down) else None


def _grouped_gemm(
    x: torch.Tensor,
    given: ExpertWeights,
    bias: torch.Tensor | None,
    pairs: torch.Tensor,
    experts: torch.Tensor,
    factors: torch.Tensor | None,
    count: int,
    share: int,
    block: int,
) -> torch.Tensor:
    number, n, k = given.shape
    out = torch.empty(count, n, dtype=x.dtype, device=x.device)
    tensors = bias, out, pairs, experts, factors
    if isinstance(given, torch.Tensor) or count < _FULL_ROWS * number:
        _launch(x, given, range(number), tensors, count, share, block)
        return out
    step = max(1, _FULL_BYTES // (n * k * x.element_size()))
    for first in range(0, number, step):
        some = range(first, min(first + step, number))
        weight = dequantize(given.some(some), x.dtype).view(len(some), n, k)
        _launch(x, weight, some, tensors, count, share, block)
    return out


def _launch(
    x: torch.Tensor,
    given: ExpertWeights,
    some: range,
    tensors: tuple[torch.Tensor | None, ...],
    count: int,
    share: int,
    block: int,
) -> None:
    """Compute the tiles of some experts, whose weights are given. `tensors` are those from `bias_ptr` on."""
    _, n, k = given.shape
    block_n = 64 if block <= 16 else 128
    if isinstance(given, torch.Tensor):
        weight, scales, zeros, stride, form, scale_rows, columns, block_k = given, None, None, 0, "full", 1, 1, 64
    else:
        weight, scales, zeros = given.weight.codes, given.weight.scales, given.weight.zeros
        stride, form, scale_rows = scales.stride(0), given.weight.format, given.weight.block[0]
        columns, block_k = columns_of(given.weight)
    experts = tensors[3]
    launch(
        grouped_gemm_kernel,
        (cdiv(n, block_n), 0 if experts is None else len(experts)),
        (x, weight, scales, zeros, *tensors),
        (count, some.start, some.stop, n, k, share, stride),
        FORMAT=form,
        SCALE_ROWS=scale_rows,
        SCALE_COLUMNS=columns,
        BLOCK_M=block,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=4 if block <= 16 else 8,
        num_stages=3,
        **pdl_options(x.device),
    )
