"""Fused norms of queries and keys, rotary embedding, and KV store.

The references are `tercet.kernels.ops.rope.apply_rope`, `ops.rmsnorm` and `ops.store_kv`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import Tiling, cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.linear.fp8 import as_bits, e4m3_bits
from tercet.kernels.triton.rmsnorm import rounded_for

TILINGS = (
    Tiling(2, 4),
    Tiling(1, 2),
    Tiling(1, 1),
    Tiling(2, 2),
    Tiling(4, 2),
    Tiling(4, 4),
    Tiling(8, 2),
    Tiling(8, 4),
    Tiling(8, 8),
)
"""Tilings by KV heads of one token, with their query heads. The first is in use."""


@triton.jit
def halves(at, there, HALF: tl.constexpr):
    """Load the two halves [n, BLOCK] of heads."""
    return tl.load(at, mask=there, other=0.0), tl.load(at + HALF, mask=there, other=0.0)


@triton.jit
def for_each(at, N: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Load the two halves of one vector as float32 [N, BLOCK], once for every head, which avoids thread exchanges."""
    column = tl.arange(0, BLOCK)[None, :]
    there = tl.broadcast_to(column < HALF, N, BLOCK)
    low, high = halves(tl.broadcast_to(at + column, N, BLOCK), there, HALF)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def rotated(low, high, cos, sin, weight_ptr, eps, N: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate halves of heads [N, BLOCK], after normalizing them if there is a weight."""
    dtype = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if weight_ptr is not None:
        weight_low, weight_high = for_each(weight_ptr, N, HALF, BLOCK)
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        low = rounded_for(low * scale, dtype, weight_ptr) * weight_low
        high = rounded_for(high * scale, dtype, weight_ptr) * weight_high
    cos = cos.to(dtype).to(tl.float32)
    sin = sin.to(dtype).to(tl.float32)
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit
def as_cached(x, inverse, dtype: tl.constexpr):
    """Convert a key or value to a cache's dtype; `inverse` is 1 / scale of an 8-bit cache (e4m3 or its bits)."""
    if dtype.primitive_bitwidth == 8:
        return e4m3_bits(x.to(tl.float32) * inverse).to(dtype, bitcast=True)
    return x.to(dtype)


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])  # views of a step's buffer
def rope_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,  # [tokens, heads, 2 * HALF]
    k_cache_ptr,
    v_cache_ptr,
    positions_ptr,
    slots_ptr,
    table_ptr,  # float32 [positions, 2 * HALF], cosines first
    q_weight_ptr,
    k_weight_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_slot,
    eps,
    k_inverse,
    v_inverse,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TAKEN: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process some of the HEADS KV heads of one token, and the query heads that share them."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TAKEN
    column, whole = tl.arange(0, BLOCK)[None, :], tl.arange(0, 2 * BLOCK)[None, :]
    q_index, kv_index = tl.arange(0, BLOCK_Q)[:, None], tl.arange(0, BLOCK_KV)[:, None]
    q_head, kv_head = first * GROUP + q_index, first + kv_index
    q_there = (q_index < TAKEN * GROUP) & (q_head < HEADS * GROUP) & (column < HALF)
    kv_there = (kv_index < TAKEN) & (kv_head < HEADS)
    k_there, v_there = kv_there & (column < HALF), kv_there & (whole < 2 * HALF)
    q_at, k_at, v_at = q_head * 2 * HALF + column, kv_head * 2 * HALF + column, kv_head * 2 * HALF + whole
    pdl_wait(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    place = tl.load(slots_ptr + token) * stride_slot
    q_low, q_high = halves(q_ptr + token * stride_q + q_at, q_there, HALF)
    k_low, k_high = halves(k_ptr + token * stride_k + k_at, k_there, HALF)
    v = tl.load(v_ptr + token * stride_v + v_at, mask=v_there, other=0.0)
    pdl_launch_next(PDL)  # also keeps loads that depend on the position after those that do not
    table_at = table_ptr + position * 2 * HALF
    k_cos, k_sin = for_each(table_at, BLOCK_KV, HALF, BLOCK)
    q_cos, q_sin = for_each(table_at, BLOCK_Q, HALF, BLOCK)
    cached = k_cache_ptr.dtype.element_ty
    tl.store(v_cache_ptr + place + v_at, as_cached(v, v_inverse, cached), mask=v_there)
    low, high = rotated(k_low, k_high, k_cos, k_sin, k_weight_ptr, eps, BLOCK_KV, HALF, BLOCK)
    tl.store(k_cache_ptr + place + k_at, as_cached(low, k_inverse, cached), mask=k_there)
    tl.store(k_cache_ptr + place + k_at + HALF, as_cached(high, k_inverse, cached), mask=k_there)
    low, high = rotated(q_low, q_high, q_cos, q_sin, q_weight_ptr, eps, BLOCK_Q, HALF, BLOCK)
    out_at = out_ptr + token * HEADS * GROUP * 2 * HALF + q_at
    tl.store(out_at, low, mask=q_there)
    tl.store(out_at + HALF, high, mask=q_there)


def rope_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    scales: tuple[float, float] = (1.0, 1.0),
    tiling: Tiling = TILINGS[0],
) -> torch.Tensor:
    """Rotate q and k to `positions`, store k and v in the caches, return the rotated q [tokens, heads, head_dim].

    q, k and v [tokens, heads, head_dim] may be views of one projection. `norms` are the weights of RMS norms over heads
    of q and k, applied before rotation. `table` is from `rope_cache`, as wide as a head, and `scales` are those of
    `store_kv`.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    require_whole_heads(table, q, k, v)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    q_weight, k_weight = norms or (None, None)
    group, taken = heads // kv_heads, min(tiling.block, kv_heads)
    caches, strides = (as_bits(k_cache), as_bits(v_cache)), [x.stride()[0] for x in (q, k, v)]
    launch(
        rope_store_kernel,
        (tokens, cdiv(kv_heads, taken)),
        (q, k, v, out, *caches, positions, slot_mapping, table, q_weight, k_weight),
        (*strides, k_cache.stride()[1], eps, 1 / scales[0], 1 / scales[1]),
        HEADS=kv_heads,
        GROUP=group,
        TAKEN=taken,
        HALF=head_dim // 2,
        BLOCK_Q=power_of_two(taken * group),
        BLOCK_KV=power_of_two(taken),
        BLOCK=power_of_two(head_dim // 2),
        num_warps=tiling.warps,
        **pdl_options(q.device),
    )
    return out


def require_whole_heads(table: torch.Tensor, *parts: torch.Tensor) -> None:
    """Raise ValueError unless the table is as wide as a head, and heads [tokens, heads, head_dim] are contiguous."""
    size = table.shape[1]
    for x in parts:
        if x.shape[2] != size or x.stride()[1:] != (size, 1):
            raise ValueError(f"heads of {x.shape[2]} with strides {x.stride()} and a table of {size}")
