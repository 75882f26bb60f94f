"""Rotary embedding, with the norms of queries and keys before it and the KV store after it, all in one pass.

The references are `tercet.kernels.ops.rope.apply_rope`, `ops.rmsnorm` and `ops.store_kv`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.fp8 import as_bits, e4m3_bits
from tercet.kernels.triton.launch import await_previous, early_start, power_of_two, release_next


@triton.jit
def _rotated(at, heads, weight_ptr, cos, sin, eps, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """The heads at `at` [n, 1], normalised if there is a weight, and rotated: two halves [n, BLOCK]."""
    column = tl.arange(0, BLOCK)
    there = heads[:, None] & (column < HALF)[None, :]
    low = tl.load(at + column[None, :], mask=there, other=0.0)
    high = tl.load(at + HALF + column[None, :], mask=there, other=0.0)
    dtype = low.dtype
    low = low.to(tl.float32)
    high = high.to(tl.float32)
    if weight_ptr is not None:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / (2 * HALF) + eps)[:, None]
        weight_low = tl.load(weight_ptr + column, mask=column < HALF, other=0.0).to(tl.float32)
        weight_high = tl.load(weight_ptr + HALF + column, mask=column < HALF, other=0.0).to(tl.float32)
        low = (low * scale).to(dtype).to(tl.float32) * weight_low[None, :]
        high = (high * scale).to(dtype).to(tl.float32) * weight_high[None, :]
    return (low * cos - high * sin).to(dtype), (high * cos + low * sin).to(dtype)


@triton.jit
def _cached(x, inverse, dtype: tl.constexpr):
    """A key or value as a cache keeps it; `inverse` is of its scale, in a cache of bits."""
    if dtype == tl.uint8:
        return e4m3_bits(x.to(tl.float32) * inverse)
    return x.to(dtype)


@triton.jit
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
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One KV head of one token, and the query heads that share it."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    in_half = column < HALF
    await_previous(EARLY)
    table_at = table_ptr + tl.load(positions_ptr + token).to(tl.int64) * 2 * HALF + column
    rounded = out_ptr.dtype.element_ty
    cos = tl.load(table_at, mask=in_half, other=0.0).to(rounded).to(tl.float32)[None, :]
    sin = tl.load(table_at + HALF, mask=in_half, other=0.0).to(rounded).to(tl.float32)[None, :]
    index = tl.arange(0, BLOCK_GROUP)
    heads = index < GROUP
    head = (kv_head * GROUP + index)[:, None] * 2 * HALF
    low, high = _rotated(q_ptr + token * stride_q + head, heads, q_weight_ptr, cos, sin, eps, HALF, BLOCK)
    out_at = out_ptr + token * tl.num_programs(1) * GROUP * 2 * HALF + head + column[None, :]
    there = heads[:, None] & in_half[None, :]
    tl.store(out_at, low, mask=there)
    tl.store(out_at + HALF, high, mask=there)
    one = tl.arange(0, 1)
    place = tl.load(slots_ptr + token) * stride_slot + kv_head * 2 * HALF
    k_at = k_ptr + token * stride_k + kv_head * 2 * HALF + one[:, None]
    low, high = _rotated(k_at, one < 1, k_weight_ptr, cos, sin, eps, HALF, BLOCK)
    cache_at = k_cache_ptr + place + one[:, None] + column[None, :]
    cached = k_cache_ptr.dtype.element_ty
    tl.store(cache_at, _cached(low, k_inverse, cached), mask=in_half[None, :])
    tl.store(cache_at + HALF, _cached(high, k_inverse, cached), mask=in_half[None, :])
    v_at = v_ptr + token * stride_v + kv_head * 2 * HALF + column
    release_next(EARLY)
    for half in tl.static_range(2):
        v = tl.load(v_at + half * HALF, mask=in_half, other=0.0)
        tl.store(v_cache_ptr + place + half * HALF + column, _cached(v, v_inverse, cached), mask=in_half)


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
) -> torch.Tensor:
    """Rotate q and k to `positions`, write k and v into the caches, and return the rotated q [tokens, heads, head_dim].

    q, k and v [tokens, heads, head_dim] may be parts of one projection. `norms` are the weights of RMS norms over the
    heads of q and of k, before they are rotated. `table` is that of `rope_cache`, over the whole of a head, and
    `scales` those of `store_kv`.
    """
    tokens, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    if table.shape[1] != head_dim or any(x.stride(2) != 1 or x.stride(1) != head_dim for x in (q, k, v)):
        raise ValueError(f"heads of {head_dim} with strides {q.stride()} and a table of {table.shape[1]}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q_weight, k_weight = norms or (None, None)
    group = heads // kv_heads
    rope_store_kernel[tokens, kv_heads](
        q,
        k,
        v,
        out,
        as_bits(k_cache),
        as_bits(v_cache),
        positions,
        slot_mapping,
        table,
        q_weight,
        k_weight,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        k_cache.stride(1),
        eps,
        1 / scales[0],
        1 / scales[1],
        GROUP=group,
        HALF=head_dim // 2,
        BLOCK_GROUP=power_of_two(group),
        BLOCK=power_of_two(head_dim // 2),
        num_warps=2,
        **early_start(q.device),
    )
    return out
