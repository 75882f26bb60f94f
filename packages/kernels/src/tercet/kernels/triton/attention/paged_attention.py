"""Paged attention: decode with split KV (flash-decoding), and extend by tiles of queries.

Both stream over blocks of keys and values and keep a running softmax in base 2 (FlashAttention-2,
https://arxiv.org/abs/2307.08691). Query heads that share a KV head are in one tile, so that each key and value is read
once for all of them. A decode has one query and thus too few tiles to fill a GPU: its keys are cut into splits that are
computed in parallel. Few splits are merged by the last one to finish, many by a second kernel. Splits divide the row's
own length evenly; that length is read on the device, so a captured graph stays correct as rows grow. The grid has as
many programs as the longest possible row needs; programs without keys exit at once.

If rows are many, a list assigns a split of a row to each program, so that long rows have many splits, short ones have
one, and few programs are idle. It is computed from one step's lengths and rewritten for the next, also under CUDA
graphs.

Lengths, pages and windows decide which addresses are loaded, so memory past the end of a row never affects a sum.

The number of splits and the width of page tables change from step to step. The compiler does not specialize on them,
because it would recompile kernels, which takes seconds, while serving.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait
from tercet.kernels.triton.linear.fp8 import widened

LOG2_E = tl.constexpr(1.4426950408889634)
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _stream(
    q,  # [M, D]
    acc,  # float32 [M, D]
    top,  # float32 [M]: the largest score so far, in base 2
    total,  # float32 [M]
    position,  # [M]
    k_ptr,  # of this KV head, like v_ptr
    v_ptr,
    pages_ptr,  # of this row
    kv_heads,
    first,
    last,
    scale,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Accumulate keys [first, last) of one row in the running softmax.

    SEEN is "blocks" if all queries see all keys, which are whole blocks; "keys" if the last block may have fewer;
    "earlier" if a query sees the keys up to its `position`, within the window. `scale` is positive.
    """
    dim = tl.arange(0, q.shape[1])
    in_head = dim < HEAD_DIM
    for start in tl.range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < last
        if SEEN == "blocks":
            there = tl.full([BLOCK_N], 1, tl.int1)
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=there, other=0)
        at = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE) * (kv_heads * HEAD_DIM)
        k = tl.load(k_ptr + at[None, :] + dim[:, None], mask=there[None, :] & in_head[:, None], other=0.0)
        k = widened(k, q.dtype)
        scores = tl.dot(q, k, input_precision="tf32x3")
        factor = scale * LOG2_E  # to base 2; multiplied into the difference below, so that it costs no instruction
        if SOFTCAP > 0:
            scores = SOFTCAP - 2 * SOFTCAP / (tl.exp(2 / SOFTCAP * scale * scores) + 1)  # SOFTCAP * tanh(x / SOFTCAP)
            factor = LOG2_E
        if SEEN == "earlier":
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, NEG_INF)
        elif SEEN == "keys":
            scores = tl.where(there[None, :], scores, NEG_INF)
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        base = tl.where(higher == NEG_INF, 0.0, higher)  # a query may have seen no key yet
        weights = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(v_ptr + at[:, None] + dim[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        v = widened(v, q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return acc, top, total


@triton.jit
def initial_softmax(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the initial state of the running softmax: (sum of values, largest score, sum of weights)."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    return acc, tl.full([BLOCK_M], NEG_INF, tl.float32), tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def _with_sink(acc, top, total, sink):
    """Normalize the sum `acc`, including a score without a value; `sink` is in base 2, -inf for none."""
    higher = tl.maximum(top, sink)
    base = tl.where(higher == NEG_INF, 0.0, higher)
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.exp2(sink - base)
    return acc * (shrink / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def _sinks(sinks_ptr, head, there):
    """Load the sink of each head in base 2; -inf without sinks."""
    sink = tl.full(head.shape, NEG_INF, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=there, other=0.0).to(tl.float32) * LOG2_E
    return sink


@triton.jit(
    do_not_specialize=["stride_pages", "splits"],
    do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr"],  # parts of one buffer
)
def decode_kernel(
    q_ptr,  # [rows, heads, HEAD_DIM] with stride `stride_row`
    k_ptr,  # [pages, PAGE_SIZE, KV heads, HEAD_DIM], like v_ptr; e4m3 possibly as raw bits (`readable`)
    v_ptr,
    out_ptr,  # [rows, heads, HEAD_DIM], or float32 [rows, heads, splits, HEAD_DIM] with several splits
    lse_ptr,  # float32 [rows, heads, splits]; with a list, both are [splits in the list, heads]
    merged_ptr,  # like `out_ptr` of one split: results, if the last split of a row to finish merges all
    finished_ptr,  # int32 [rows, KV heads]: number of finished splits, 0 before and after; None if a kernel merges
    split_list_ptr,  # int32 [splits in the list, 4] (`split_list`), or None if each row has `splits`
    sinks_ptr,
    pages_ptr,
    kv_lens_ptr,
    stride_row,
    stride_pages,
    splits,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MULTIPLE_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one split of one row and KV head.

    MULTIPLE_SPLITS splits of a row are merged by the last of them, or by a later kernel.
    """
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pdl_wait(PDL)
    row, split, used, share, kv_len = assigned_split(split_list_ptr, kv_lens_ptr, row, split, WINDOW, splits, BLOCK_N)
    index = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + index
    if split >= used:
        mark_empty_split(lse_ptr, finished_ptr, row * tl.num_programs(0) * GROUP + head, splits, split, index < GROUP)
        return
    dim = tl.arange(0, BLOCK_D)
    head_mask = (index < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * stride_row + head[:, None] * HEAD_DIM + dim[None, :], mask=head_mask, other=0.0)
    attend_split(
        q, row, kv_head, split, used, share, kv_len, k_ptr, v_ptr, out_ptr, lse_ptr, merged_ptr, finished_ptr,
        split_list_ptr, sinks_ptr, pages_ptr + row * stride_pages, splits, scale, GROUP, HEAD_DIM, PAGE_SIZE, WINDOW,
        SOFTCAP, MULTIPLE_SPLITS, BLOCK_N, PDL,
    )  # fmt: skip


@triton.jit
def attend_split(
    q,  # [M, D]: the query heads of one row and KV head, zero-padded
    row,
    kv_head,
    split,
    used,
    share,
    kv_len,
    k_ptr,  # this and other undocumented parameters are as in `decode_kernel`
    v_ptr,
    out_ptr,
    lse_ptr,
    merged_ptr,
    finished_ptr,
    split_list_ptr,
    sinks_ptr,
    pages_ptr,  # of this row
    splits,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MULTIPLE_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one of `used` splits with `share` keys of one row and KV head, for queries in registers."""
    first = first_visible_key(kv_len, WINDOW) + split * share
    last = tl.minimum(first + share, kv_len)
    index, dim = tl.arange(0, q.shape[0]), tl.arange(0, q.shape[1])
    head = kv_head * GROUP + index
    head_mask = (index < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    acc, top, total = initial_softmax(q.shape[0], q.shape[1])
    k_at, v_at = k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM
    acc, top, total = _stream(
        q, acc, top, total, index, k_at, v_at, pages_ptr, tl.num_programs(0), first, last, scale,
        HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, "keys", BLOCK_N,
    )  # fmt: skip
    pdl_launch_next(PDL)
    row_head = row * tl.num_programs(0) * GROUP + head
    merged_at = merged_ptr + row_head[:, None] * HEAD_DIM + dim[None, :]
    is_only_split = used == 1 if finished_ptr is not None else not MULTIPLE_SPLITS
    if is_only_split:
        out = _with_sink(acc, top, total, _sinks(sinks_ptr, head, index < GROUP))
        tl.store(merged_at, out.to(merged_ptr.dtype.element_ty), mask=head_mask)
    else:
        offsets, distance = split_offsets(split_list_ptr, head, row_head, tl.num_programs(0) * GROUP, splits, split)
        place = offsets + split * distance
        tl.store(lse_ptr + place, top + tl.log2(total), mask=index < GROUP)
        tl.store(out_ptr + place[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=head_mask)
        if finished_ptr is not None:
            finished_at = finished_ptr + row * tl.num_programs(0) + kv_head
            sink = _sinks(sinks_ptr, head, index < GROUP)
            merge_if_last(
                finished_at, out_ptr, lse_ptr, merged_ptr, row_head, offsets, distance, used, sink, head_mask, HEAD_DIM
            )


@triton.jit
def mark_empty_split(lse_ptr, finished_ptr, row_head, splits, split, there):
    """Mark a split without keys as empty, for a merge kernel, which reads all splits."""
    if finished_ptr is None:
        tl.store(lse_ptr + row_head * splits + split, tl.full(row_head.shape, NEG_INF, tl.float32), mask=there)


@triton.jit
def merge_if_last(
    finished_at, parts_ptr, lse_ptr, merged_ptr, row_head, offsets, distance, used, sink, head_mask,
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Count a split of some heads as finished; the last of `used` merges all and resets the counter."""
    tl.debug_barrier()  # the counting thread must publish the stores of all threads of this program
    if tl.atomic_add(finished_at, 1, sem="acq_rel") == used - 1:
        tl.store(finished_at, 0)
        out = _merged(parts_ptr, lse_ptr, offsets, distance, used, sink, head_mask, HEAD_DIM)
        out_at = merged_ptr + row_head[:, None] * HEAD_DIM + tl.arange(0, head_mask.shape[1])[None, :]
        tl.store(out_at, out.to(merged_ptr.dtype.element_ty), mask=head_mask)


@triton.jit
def _merged(parts_ptr, lse_ptr, offsets, distance, used, sink, head_mask, HEAD_DIM: tl.constexpr):
    """Merge the splits of some heads [M], written by other programs, by their softmax weights: [M, D]."""
    dim = tl.arange(0, head_mask.shape[1])
    there = tl.max(head_mask.to(tl.int32), 1) > 0
    highest = sink
    for split in tl.range(used):
        lse = tl.load(lse_ptr + offsets + split * distance, mask=there, other=NEG_INF, cache_modifier=".cg")
        highest = tl.maximum(highest, lse)
    highest = tl.where(highest == NEG_INF, 0.0, highest)  # of rows of the tile that are no heads
    total = tl.exp2(sink - highest)
    out = tl.zeros(head_mask.shape, tl.float32)
    for split in tl.range(used):
        place = offsets + split * distance
        weight = tl.exp2(tl.load(lse_ptr + place, mask=there, other=NEG_INF, cache_modifier=".cg") - highest)
        at = parts_ptr + place[:, None] * HEAD_DIM + dim[None, :]
        out += weight[:, None] * tl.load(at, mask=head_mask, other=0.0, cache_modifier=".cg")
        total += weight
    return out / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def split_list(split_list_ptr):
    """Return (row, split, splits of the row, keys of a split) of this program; 0 splits mean no work."""
    at = split_list_ptr + tl.program_id(2) * 4
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def assigned_split(split_list_ptr, kv_lens_ptr, row, split, WINDOW: tl.constexpr, splits, BLOCK_N: tl.constexpr):
    """Return (row, split, splits in use, keys of a split, keys of the row), from the list if there is one."""
    if split_list_ptr is not None:
        row, split, used, share = split_list(split_list_ptr)
        kv_len = tl.load(kv_lens_ptr + row)
    else:
        kv_len = tl.load(kv_lens_ptr + row)
        used, share = even_splits(kv_len, WINDOW, splits, BLOCK_N)
    return row, split, used, share, kv_len


@triton.jit
def first_visible_key(kv_len, WINDOW: tl.constexpr):
    """Return the first key that a row's last token sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - WINDOW, 0)
    return first


@triton.jit
def even_splits(kv_len, WINDOW: tl.constexpr, splits, BLOCK_N: tl.constexpr):
    """Return (splits in use, keys of each but the last) of a row: `splits` parts, as even as blocks allow."""
    seen = kv_len - first_visible_key(kv_len, WINDOW)
    share = tl.cdiv(tl.cdiv(seen, splits), BLOCK_N) * BLOCK_N
    return tl.cdiv(seen, share), share


@triton.jit
def split_offsets(split_list_ptr, head, row_head, heads, splits, split):
    """Return (index of the first split of each head, distance to the next split)."""
    offsets, distance = row_head * splits, 1
    if split_list_ptr is not None:
        offsets, distance = (tl.program_id(2).to(tl.int64) - split) * heads + head, heads
    return offsets, distance


@triton.jit
def merge_kernel(
    parts_ptr,  # float32 [rows, heads, SPLITS, HEAD_DIM]
    lse_ptr,  # float32 [rows, heads, SPLITS], base 2
    sinks_ptr,
    out_ptr,  # [rows, heads, HEAD_DIM]
    heads,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge the splits of one row and head by their softmax weights."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, BLOCK_D)
    pdl_wait(PDL)
    lse = tl.load(lse_ptr + place * SPLITS + split)
    pdl_launch_next(PDL)
    highest = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + place % heads).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(lse - highest)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - highest)
    at = parts_ptr + (place * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(at, mask=(lse != NEG_INF)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out_ptr + place * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(
    do_not_specialize=["stride_pages"],
    do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr", "query_start_ptr"],
)
def extend_kernel(
    q_ptr,  # [tokens, heads, HEAD_DIM] with stride `stride_row`
    k_ptr,  # [pages, PAGE_SIZE, KV heads, HEAD_DIM], like v_ptr
    v_ptr,
    out_ptr,  # [tokens, heads, HEAD_DIM]
    sinks_ptr,
    pages_ptr,
    kv_lens_ptr,
    query_start_ptr,
    tiles_ptr,  # int32 [tiles, 2]: (row, first new token of the tile)
    stride_row,
    stride_pages,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute BLOCK_M // GROUP new tokens of one row, with all query heads of one KV head."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    pdl_wait(PDL)
    tile_at = tiles_ptr + tl.program_id(0) * 2
    row, offset = tl.load(tile_at), tl.load(tile_at + 1)
    kv_heads, kv_head = tl.num_programs(1), tl.program_id(1)
    start = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - start
    kv_len = tl.load(kv_lens_ptr + row)
    index, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = offset + index // GROUP
    head = kv_head * GROUP + index % GROUP
    head_mask = ((index < QUERIES * GROUP) & (query < count))[:, None] & (dim < HEAD_DIM)[None, :]
    token = (start + query).to(tl.int64)
    q_at = q_ptr + token[:, None] * stride_row + head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_at, mask=head_mask, other=0.0)
    position = kv_len - count + query
    earliest = kv_len - count + offset
    first = tl.maximum(earliest - WINDOW + 1, 0) if WINDOW > 0 else 0
    last = tl.minimum(earliest + QUERIES, kv_len)
    plain = first if WINDOW > 0 else (earliest + 1) // BLOCK_N * BLOCK_N  # from here on, not every query sees every key
    acc, top, total = initial_softmax(BLOCK_M, BLOCK_D)
    k_at, v_at = k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM
    pages_at = pages_ptr + row.to(tl.int64) * stride_pages
    if WINDOW == 0:
        acc, top, total = _stream(
            q, acc, top, total, position, k_at, v_at, pages_at, kv_heads, first, plain, scale,
            HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, "blocks", BLOCK_N,
        )  # fmt: skip
    acc, top, total = _stream(
        q, acc, top, total, position, k_at, v_at, pages_at, kv_heads, plain, last, scale,
        HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, "earlier", BLOCK_N,
    )  # fmt: skip
    pdl_launch_next(PDL)
    out = _with_sink(acc, top, total, _sinks(sinks_ptr, head, index < QUERIES * GROUP))
    place = (token[:, None] * kv_heads * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=head_mask)
