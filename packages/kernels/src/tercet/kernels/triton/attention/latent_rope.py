"""Fused start of a latent attention step: norm of latents, rotation, and KV store.

The references are `tercet.kernels.ops.rmsnorm`, `ops.rope.apply_rope` and a cache's `index_copy_`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.projection import Norm
from tercet.kernels.triton.attention.rope import for_each, halves, rotated
from tercet.kernels.triton.launch import pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.rmsnorm import rounded_for

_ELEMENTS = 4096
"""Maximum elements of a program with four warps; larger ones have eight."""


@triton.jit(do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])  # views of a step's buffer
def latent_rope_kernel(
    new_ptr,  # [tokens, RANK + 2 * HALF] with stride `stride_new`: latents, and unrotated rope parts of keys
    weight_ptr,  # [RANK], weight of the norm of latents
    q_pe_ptr,  # [tokens, HEADS, 2 * HALF] strides `stride_token`, `stride_head`: unrotated rope parts of queries
    q_ptr,  # [tokens, HEADS, RANK + 2 * HALF]: the end of each query is written
    cache_ptr,  # [slots, RANK + 2 * HALF]
    positions_ptr,
    slots_ptr,
    table_ptr,  # float32 [positions, 2 * HALF], cosines first
    stride_new,
    stride_token,
    stride_head,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Process one token with all of its heads."""
    WIDTH: tl.constexpr = RANK + 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    dim, column, head = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK)[None, :], tl.arange(0, BLOCK_H)[:, None]
    in_rank, in_half = dim < RANK, column < HALF
    heads_there = (head < HEADS) & in_half
    weight = tl.load(weight_ptr + dim, mask=in_rank, other=0.0).to(tl.float32)
    pdl_wait(PDL)
    position = tl.load(positions_ptr + token).to(tl.int64)
    place = cache_ptr + tl.load(slots_ptr + token).to(tl.int64) * WIDTH
    new_at = new_ptr + token * stride_new
    latent = tl.load(new_at + dim, mask=in_rank, other=0.0)
    key_low, key_high = halves(new_at + RANK + column, in_half, HALF)
    q_low, q_high = halves(q_pe_ptr + token * stride_token + head * stride_head + column, heads_there, HALF)
    pdl_launch_next(PDL)
    wide = latent.to(tl.float32)
    normed = rounded_for(wide * tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps), latent.dtype, weight_ptr) * weight
    tl.store(place + dim, normed.to(latent.dtype).to(cache_ptr.dtype.element_ty), mask=in_rank)
    table_at = table_ptr + position * 2 * HALF
    cos, sin = for_each(table_at, 1, HALF, BLOCK)
    low, high = rotated(key_low, key_high, cos, sin, None, eps, 1, HALF, BLOCK)
    tl.store(place + RANK + column, low.to(cache_ptr.dtype.element_ty), mask=in_half)
    tl.store(place + RANK + HALF + column, high.to(cache_ptr.dtype.element_ty), mask=in_half)
    cos, sin = for_each(table_at, BLOCK_H, HALF, BLOCK)
    low, high = rotated(q_low, q_high, cos, sin, None, eps, BLOCK_H, HALF, BLOCK)
    out_at = q_ptr + (token * HEADS + head) * WIDTH + RANK + column
    tl.store(out_at, low, mask=heads_there)
    tl.store(out_at + HALF, high, mask=heads_there)


def latent_rope_store(
    q: torch.Tensor,
    q_pe: torch.Tensor,
    new: torch.Tensor,
    norm: Norm,
    positions: torch.Tensor,
    table: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write rotated parts of queries into q, and normalized latents and rotated keys into the cache.

    q [tokens, heads, rank + rope] and the cache [pages, page_size, 1, rank + rope] are contiguous; `q_pe` is [tokens,
    heads, rope], and `new` [tokens, rank + rope], with arbitrary strides except within a row. `table` is from
    `rope_cache`, as wide as rope. Raises ValueError for tensors that do not fit.
    """
    tokens, heads, rope = q_pe.shape
    width = new.shape[1]
    rank = width - rope
    if table.shape[1] != rope or q_pe.stride(2) != 1:
        raise ValueError(f"heads of {rope} with strides {q_pe.stride()} and a table of {table.shape[1]}")
    if q.shape != (tokens, heads, width) or cache.shape[2:] != (1, width) or new.stride(1) != 1:
        raise ValueError(f"queries {list(q.shape)} and a cache {list(cache.shape)} for what is new, {list(new.shape)}")
    if not q.is_contiguous() or not cache.is_contiguous():
        raise ValueError("queries and caches of latents are contiguous")
    launch(
        latent_rope_kernel,
        (tokens,),
        (new, norm.weight, q_pe, q, cache, positions, slot_mapping, table),
        (new.stride(0), q_pe.stride(0), q_pe.stride(1), norm.eps),
        HEADS=heads,
        RANK=rank,
        HALF=rope // 2,
        BLOCK_H=power_of_two(heads),
        BLOCK_R=power_of_two(rank),
        BLOCK=power_of_two(rope // 2),
        num_warps=4 if heads * rope <= _ELEMENTS else 8,
        **pdl_options(q.device),
    )
