"""Latent attention (MLA) over pages: one vector for each token, whose first RANK elements are the value of all heads.

The kernels follow `paged_attention`, but load a block of vectors once: their first elements are used for scores, and
again as values. The last ROPE elements, which belong to keys only, form a second product, so that neither part is
padded to the power of two above the sum. A tile has a block of heads: those of one token in a decode, of a few tokens
in an extend.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.attention.paged_attention import (
    LOG2_E,
    NEG_INF,
    assigned_split,
    initial_softmax,
    mark_empty_split,
    merge_if_last,
    split_offsets,
)
from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait
from tercet.kernels.triton.linear.fp8 import widened


@triton.jit
def _stream(
    q,  # [M, R]
    q_pe,  # [M, P]: the rotated part of the queries
    acc,  # float32 [M, R]
    top,  # float32 [M]: the largest score so far, in base 2
    total,  # float32 [M]
    position,  # [M]
    cache_ptr,
    pages_ptr,  # of this row
    first,
    last,
    scale,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Accumulate vectors [first, last) of one row in the running softmax; without MASKED all queries see all."""
    dim, end = tl.arange(0, q.shape[1]), tl.arange(0, q_pe.shape[1])
    for start in tl.range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < last
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=there, other=0)
        at = cache_ptr + (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE) * (RANK + ROPE)
        latent = tl.load(at[:, None] + dim[None, :], mask=there[:, None] & (dim < RANK)[None, :], other=0.0)
        rest = tl.load(at[None, :] + RANK + end[:, None], mask=there[None, :] & (end < ROPE)[:, None], other=0.0)
        latent = widened(latent, q.dtype)
        scores = tl.dot(q, tl.trans(latent), input_precision="tf32x3")
        scores = tl.dot(q_pe, widened(rest, q.dtype), scores, input_precision="tf32x3") * (scale * LOG2_E)
        seen = there[None, :]
        if MASKED:
            seen = seen & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores, NEG_INF)
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == NEG_INF, 0.0, higher)  # a query may have seen no key yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        acc = tl.dot(weights.to(q.dtype), latent, acc * shrink[:, None], input_precision="tf32x3")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return acc, top, total


@triton.jit
def _queries(at, there, RANK: tl.constexpr, ROPE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load the two parts of queries that begin at `at` [M]; masked ones are zero."""
    dim, end = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_P)
    q = tl.load(at[:, None] + dim[None, :], mask=there[:, None] & (dim < RANK)[None, :], other=0.0)
    q_pe = tl.load(at[:, None] + RANK + end[None, :], mask=there[:, None] & (end < ROPE)[None, :], other=0.0)
    return q, q_pe


@triton.jit(
    do_not_specialize=["stride_pages", "splits"],
    do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr"],  # parts of one buffer
)
def latent_decode_kernel(
    q_ptr,  # [rows, heads, RANK + ROPE] with strides `stride_row` and `stride_head`
    cache_ptr,  # [pages, PAGE_SIZE, RANK + ROPE]; e4m3 possibly as raw bits (`readable`)
    out_ptr,  # [rows, heads, RANK], or float32 [rows, heads, splits, RANK] with several splits
    lse_ptr,  # float32 [rows, heads, splits]
    merged_ptr,  # like `out_ptr` of one split: results, if the last split of a row to finish merges all
    finished_ptr,  # int32 [rows, blocks of heads]: number of finished splits; the rest is as in `decode_kernel`
    split_list_ptr,
    pages_ptr,
    kv_lens_ptr,
    stride_row,
    stride_head,
    stride_pages,
    splits,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MULTIPLE_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one split of one row and block of GROUP heads. The last of MULTIPLE_SPLITS, or a later kernel, merges."""
    block, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pdl_wait(PDL)
    row, split, used, share, kv_len = assigned_split(split_list_ptr, kv_lens_ptr, row, split, 0, splits, BLOCK_N)
    index = tl.arange(0, BLOCK_M)
    head = block * GROUP + index
    head_mask, row_head = (index < GROUP) & (head < HEADS), row * HEADS + head
    if split >= used:
        mark_empty_split(lse_ptr, finished_ptr, row_head, splits, split, head_mask)
        return
    q, q_pe = _queries(q_ptr + row * stride_row + head * stride_head, head_mask, RANK, ROPE, BLOCK_R, BLOCK_P)
    acc, top, total = initial_softmax(BLOCK_M, BLOCK_R)
    acc, top, total = _stream(
        q, q_pe, acc, top, total, index, cache_ptr, pages_ptr + row * stride_pages, split * share,
        tl.minimum(split * share + share, kv_len), scale, RANK, ROPE, PAGE_SIZE, False, BLOCK_N,
    )  # fmt: skip
    pdl_launch_next(PDL)
    dim = tl.arange(0, BLOCK_R)
    kept = head_mask[:, None] & (dim < RANK)[None, :]
    out = acc / total[:, None]
    is_only_split = used == 1 if finished_ptr is not None else not MULTIPLE_SPLITS
    if is_only_split:
        tl.store(merged_ptr + row_head[:, None] * RANK + dim[None, :], out.to(merged_ptr.dtype.element_ty), mask=kept)
    else:
        offsets, distance = split_offsets(split_list_ptr, head, row_head, HEADS, splits, split)
        place = offsets + split * distance
        tl.store(lse_ptr + place, top + tl.log2(total), mask=head_mask)
        tl.store(out_ptr + place[:, None] * RANK + dim[None, :], out, mask=kept)
        if finished_ptr is not None:
            merge_if_last(
                finished_ptr + row * tl.num_programs(0) + block, out_ptr, lse_ptr, merged_ptr, row_head, offsets,
                distance, used, tl.full([BLOCK_M], NEG_INF, tl.float32), kept, RANK,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=["stride_pages"],
    do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr", "query_start_ptr"],
)
def latent_extend_kernel(
    q_ptr,  # [tokens, heads, RANK + ROPE] with strides `stride_row` and `stride_head`
    cache_ptr,
    out_ptr,  # [tokens, heads, RANK]
    pages_ptr,
    kv_lens_ptr,
    query_start_ptr,
    tiles_ptr,  # int32 [tiles, 2]: (row, first new token of the tile)
    stride_row,
    stride_head,
    stride_pages,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_M // GROUP new tokens of one row, with a block of GROUP heads."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    pdl_wait(PDL)
    tile_at = tiles_ptr + tl.program_id(0) * 2
    row, offset = tl.load(tile_at), tl.load(tile_at + 1)
    start = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - start
    kv_len = tl.load(kv_lens_ptr + row)
    index = tl.arange(0, BLOCK_M)
    query = offset + index // GROUP
    head = tl.program_id(1) * GROUP + index % GROUP
    head_mask = (index < QUERIES * GROUP) & (query < count) & (head < HEADS)
    token = (start + query).to(tl.int64)
    q, q_pe = _queries(q_ptr + token * stride_row + head * stride_head, head_mask, RANK, ROPE, BLOCK_R, BLOCK_P)
    earliest = kv_len - count + offset
    last = tl.minimum(earliest + QUERIES, kv_len)
    plain = (earliest + 1) // BLOCK_N * BLOCK_N  # from here on, not every query sees every vector
    acc, top, total = initial_softmax(BLOCK_M, BLOCK_R)
    pages_at = pages_ptr + row.to(tl.int64) * stride_pages
    position = kv_len - count + query
    acc, top, total = _stream(
        q, q_pe, acc, top, total, position, cache_ptr, pages_at, 0, plain, scale,
        RANK, ROPE, PAGE_SIZE, False, BLOCK_N,
    )  # fmt: skip
    acc, top, total = _stream(
        q, q_pe, acc, top, total, position, cache_ptr, pages_at, plain, last, scale,
        RANK, ROPE, PAGE_SIZE, True, BLOCK_N,
    )  # fmt: skip
    pdl_launch_next(PDL)
    dim = tl.arange(0, BLOCK_R)
    out = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(out_ptr.dtype.element_ty)
    place = (token * HEADS + head)[:, None] * RANK + dim[None, :]
    tl.store(out_ptr + place, out, mask=head_mask[:, None] & (dim < RANK)[None, :])
