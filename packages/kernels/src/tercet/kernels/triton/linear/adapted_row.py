"""GEMV of a row with an adapter (LoRA): the rows of the adapter's `a` are further rows of the weight.

A decode of one row is bound by the number of kernels. The norm before the layer, the layer, x @ a.T and the residual
are one of them; `lora.expand` adds the adapter's outputs. The reference is `tercet.kernels.ops.lora` after
`tercet.kernels.ops.projection`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.lora import FEW_TOKENS, LoRARows, LoRAWeights
from tercet.kernels.ops.projection import Norm
from tercet.kernels.triton.launch import cdiv, pdl_options
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.gemv import row_products, rows_of, store_outputs
from tercet.kernels.triton.linear.linear import piece_for, supports_gemv
from tercet.kernels.triton.linear.lora import expand


@triton.jit(do_not_specialize_on_alignment=["table_ptr"])
def adapted_gemv_kernel(
    x_ptr,  # [SIZE]
    norm_ptr,  # [SIZE], the weight of a norm of x
    weight_ptr,  # [outputs, SIZE]
    bias_ptr,
    residual_ptr,  # [outputs], added to the outputs
    out_ptr,  # [outputs]
    a_ptr,  # [slots, RANKS, SIZE]
    table_ptr,  # int32 [1, 3]: the segment of the row, without tokens if it has no adapter
    low_ptr,  # float32 [RANKS]
    outputs,
    eps,
    SIZE: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the outputs of ROWS rows of the weight, or after these of `a`."""
    layer = tl.cdiv(outputs, ROWS)
    if tl.program_id(0) < layer:
        row, there = rows_of(outputs, ROWS, "")
        out = row_products(x_ptr, norm_ptr, weight_ptr, row, there, eps, SIZE, BLOCK, PDL)
        store_outputs(out, bias_ptr, residual_ptr, out_ptr, outputs, ROWS, "")
    else:
        rank = (tl.program_id(0) - layer) * ROWS + tl.arange(0, ROWS)
        there = (rank < RANKS) & (tl.load(table_ptr + 1) < tl.load(table_ptr + 2))
        a_at = a_ptr + tl.load(table_ptr).to(tl.int64) * RANKS * SIZE
        low = row_products(x_ptr, norm_ptr, a_at, rank, there, eps, SIZE, BLOCK, PDL)
        tl.store(low_ptr + rank, low, mask=there)


def supports_adapted_row(x: torch.Tensor, weight: torch.Tensor, adapters: LoRAWeights, rows: LoRARows) -> bool:
    """Return whether `adapted_row` supports this: one row and one segment, and adapters of the weight's dtype."""
    return len(rows.table) == 1 and adapters.a.dtype == x.dtype and supports_gemv(x, weight)


def adapted_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    adapters: LoRAWeights,
    rows: LoRARows,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return x [1, size] @ weight.T + bias with the row's adapter, after the norm, plus the residual."""
    size, outputs, ranks = x.shape[1], len(weight), adapters.a.shape[1]
    out = torch.empty(1, outputs, dtype=x.dtype, device=x.device)
    low = torch.empty(1, 1, FEW_TOKENS, ranks, dtype=torch.float32, device=x.device)
    piece, block = piece_for(outputs, size)
    launch(
        adapted_gemv_kernel,
        (cdiv(outputs, piece) + cdiv(ranks, piece),),
        (x, norm.weight if norm else None, weight, bias, residual, out, adapters.a, rows.table, low),
        (outputs, norm.eps if norm else 0.0),
        SIZE=size,
        RANKS=ranks,
        ROWS=piece,
        BLOCK=block,
        num_warps=4,
        **pdl_options(x.device),
    )
    expand(out, low, adapters, rows)
    return out
