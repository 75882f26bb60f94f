"""Fused decode: `rope.rope_store_kernel` and `paged_attention.decode_kernel` in one kernel.

Every split rotates its queries in registers. Only the split that holds the row's last key reads that key: it stores the
rotated key and the value in the cache, and then streams over them with the others. All splits load and rotate the new
key, so that these loads do not wait for the row's length and overlap with it.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.attention.paged_attention import attend_split, even_splits, mark_empty_split, split_list
from tercet.kernels.triton.attention.rope import as_cached, for_each, halves, rotated
from tercet.kernels.triton.launch import pdl_wait
from tercet.kernels.triton.rmsnorm import rounded_for


@triton.jit(
    do_not_specialize=["stride_pages", "splits"],
    do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr", "positions_ptr", "slots_ptr"],  # parts of one buffer
)
def rope_decode_kernel(
    q_ptr,  # [rows, heads, HEAD_DIM], as projected, with stride `stride_q`
    new_k_ptr,  # [rows, KV heads, HEAD_DIM], like `new_v_ptr`, with strides of their own
    new_v_ptr,
    k_ptr,  # from here to `kv_lens_ptr`: see `decode_kernel`
    v_ptr,
    out_ptr,
    lse_ptr,
    merged_ptr,
    finished_ptr,
    split_list_ptr,
    sinks_ptr,
    pages_ptr,
    kv_lens_ptr,
    positions_ptr,  # from here to `k_weight_ptr`: see `rope_store_kernel`
    slots_ptr,
    table_ptr,
    q_weight_ptr,
    k_weight_ptr,
    stride_q,
    stride_k,
    stride_v,
    stride_pages,
    splits,
    eps,
    k_inverse,
    v_inverse,
    scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    MULTIPLE_SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one split of one row and KV head, as `decode_kernel`; the split of the row's last key stores it first."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pdl_wait(PDL)
    if split_list_ptr is not None:
        row, split, used, share = split_list(split_list_ptr)
        if used == 0:
            return
    kv_len, slot = tl.load(kv_lens_ptr + row), tl.load(slots_ptr + row)
    table_at = table_ptr + tl.load(positions_ptr + row).to(tl.int64) * HEAD_DIM
    k_at, dim = new_k_ptr + row * stride_k + kv_head * HEAD_DIM, tl.arange(0, BLOCK_D)
    low, high = _key(k_at, table_at, k_weight_ptr, eps, HEAD_DIM, BLOCK_HALF)
    value = tl.load(new_v_ptr + row * stride_v + kv_head * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    q_at = q_ptr + row * stride_q + kv_head * (GROUP * HEAD_DIM)
    q = _queries(q_at, table_at, q_weight_ptr, eps, GROUP, HEAD_DIM, BLOCK_M, BLOCK_D)
    if split_list_ptr is None:
        used, share = even_splits(kv_len, WINDOW, splits, BLOCK_N)
    if split >= used:
        index, first_head = tl.arange(0, BLOCK_M), (row * tl.num_programs(0) + kv_head) * GROUP
        mark_empty_split(lse_ptr, finished_ptr, first_head + index, splits, split, index < GROUP)
        return
    place = (slot * tl.num_programs(0) + kv_head) * HEAD_DIM
    _store(low, high, value, k_ptr + place, v_ptr + place, k_inverse, v_inverse, split == used - 1, HEAD_DIM)
    tl.debug_barrier()  # makes the stores of other threads of this program visible to the following loads
    attend_split(
        q, row, kv_head, split, used, share, kv_len, k_ptr, v_ptr, out_ptr, lse_ptr, merged_ptr, finished_ptr,
        split_list_ptr, sinks_ptr, pages_ptr + row * stride_pages, splits, scale, GROUP, HEAD_DIM, PAGE_SIZE, WINDOW,
        SOFTCAP, MULTIPLE_SPLITS, BLOCK_N, PDL,
    )  # fmt: skip


@triton.jit
def _queries(
    at, table_at, weight_ptr, eps, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Load GROUP heads [BLOCK_M, BLOCK_D], normalize them if there is a weight, and rotate them.

    Each element and its rotation partner are separate loads, which avoids thread exchanges.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    index, dim = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mine = (index < GROUP) & (dim < HEAD_DIM)
    other = (dim + HALF) % HEAD_DIM
    x = tl.load(at + index * HEAD_DIM + dim, mask=mine, other=0.0)
    partner = tl.load(at + index * HEAD_DIM + other, mask=mine, other=0.0)
    dtype = x.dtype
    x, partner = x.to(tl.float32), partner.to(tl.float32)
    same = index * 0  # for every head, as in `for_each`
    if weight_ptr is not None:
        squares, low = x * x, dim < HALF
        total = tl.sum(tl.where(low, squares, 0.0), 1) + tl.sum(tl.where(low, 0.0, squares), 1)
        norm = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + same + dim, mask=mine, other=0.0).to(tl.float32)
        x = rounded_for(x * norm, dtype, weight_ptr) * weight
        weight = tl.load(weight_ptr + same + other, mask=mine, other=0.0).to(tl.float32)
        partner = rounded_for(partner * norm, dtype, weight_ptr) * weight
    cos = tl.load(table_at + same + dim % HALF, mask=mine, other=0.0).to(dtype).to(tl.float32)
    sin = tl.load(table_at + same + dim % HALF + HALF, mask=mine, other=0.0).to(dtype).to(tl.float32)
    return (x * cos + tl.where(dim < HALF, -partner, partner) * sin).to(dtype)


@triton.jit
def _key(at, table_at, weight_ptr, eps, HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr):
    """Load the halves [1, BLOCK_HALF] of one key, normalize them if there is a weight, and rotate them."""
    HALF: tl.constexpr = HEAD_DIM // 2
    half = tl.arange(0, BLOCK_HALF)[None, :]
    low, high = halves(at + half, half < HALF, HALF)
    cos, sin = for_each(table_at, 1, HALF, BLOCK_HALF)
    return rotated(low, high, cos, sin, weight_ptr, eps, 1, HALF, BLOCK_HALF)


@triton.jit
def _store(low, high, value, k_at, v_at, k_inverse, v_inverse, holds, HEAD_DIM: tl.constexpr):
    """Store a key, in halves, and a value [BLOCK_D] in the caches, if this split `holds` their position."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = k_at.dtype.element_ty
    half, dim = tl.arange(0, low.shape[1])[None, :], tl.arange(0, value.shape[0])
    tl.store(k_at + half, as_cached(low, k_inverse, dtype), mask=holds & (half < HALF))
    tl.store(k_at + half + HALF, as_cached(high, k_inverse, dtype), mask=holds & (half < HALF))
    tl.store(v_at + dim, as_cached(value, v_inverse, dtype), mask=holds & (dim < HEAD_DIM))
