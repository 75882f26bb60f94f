"""Paged attention: decode with the cache cut into splits, and extend by tiles of queries.

Both stream over keys and values in blocks and keep a running softmax in base 2 (FlashAttention-2,
https://arxiv.org/abs/2307.08691). The query heads that share a KV head lie in one tile, so that each key and value is
read once for all of them. A decode has one query, too few tiles to fill a GPU: its keys are cut into splits that are
computed side by side (flash-decoding). Few are merged by whichever ends last, many by a second kernel. Splits are as
even as the row's own length allows, and that length is read on the device: a captured graph stays right as rows grow.
There are as many programs as the longest row there could be may need; those that a row has no keys for end at once.
Where rows are many, a list says which program takes which split of which row, so that long rows have many and short
ones one, and hardly a program has none. It is of one step's lengths, and written anew for the next, also if a graph
reads it.

Lengths, pages and windows decide what is loaded at all, so what lies past the end of a row never reaches a sum.

Splits and the width of page tables change from step to step. They are numbers like any other to the compiler, which
would else compile a kernel again for each: seconds in the middle of serving.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait
from tercet.kernels.triton.linear.fp8 import widened

LOG2_E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _stream(
    q,  # [M, D]
    acc,  # float32 [M, D]
    top,  # float32 [M]: the largest score so far, in base 2
    total,  # float32 [M]
    position,  # [M]
    k_ptr,  # of this KV head, as v_ptr
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
    MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Keys [first, last) of one row into the running softmax; unless MASKED, every query sees all of them."""
    dim = tl.arange(0, q.shape[1])
    in_head = dim < HEAD_DIM
    for start in tl.range(first, last, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        there = key < last
        page = tl.load(pages_ptr + key // PAGE_SIZE, mask=there, other=0)
        at = (page.to(tl.int64) * PAGE_SIZE + key % PAGE_SIZE) * (kv_heads * HEAD_DIM)
        k = tl.load(k_ptr + at[None, :] + dim[:, None], mask=there[None, :] & in_head[:, None], other=0.0)
        k = widened(k, q.dtype)
        scores = tl.dot(q, k, input_precision="tf32x3") * scale
        if SOFTCAP > 0:
            scores = SOFTCAP - 2 * SOFTCAP / (tl.exp(2 / SOFTCAP * scores) + 1)  # SOFTCAP * tanh(scores / SOFTCAP)
        scores = scores * LOG2_E
        seen = there[None, :]
        if MASKED:
            seen = seen & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, NOTHING)
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == NOTHING, 0.0, higher)  # a query may have seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        v = tl.load(v_ptr + at[:, None] + dim[None, :], mask=there[:, None] & in_head[None, :], other=0.0)
        v = widened(v, q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
        total = total * shrink + tl.sum(weights, 1)
        top = higher
    return acc, top, total


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The running softmax before the first key: (sum of values, largest score, sum of weights)."""
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    return acc, tl.full([BLOCK_M], NOTHING, tl.float32), tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def _with_sink(acc, top, total, sink):
    """The sum `acc` normalised, with a score that has no value; `sink` is in base 2, -inf for none."""
    higher = tl.maximum(top, sink)
    base = tl.where(higher == NOTHING, 0.0, higher)
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.exp2(sink - base)
    return acc * (shrink / tl.where(total == 0, 1.0, total))[:, None]


@triton.jit
def _sinks(sinks_ptr, head, there):
    """The sink of each head in base 2; -inf where there are none."""
    sink = tl.full(head.shape, NOTHING, tl.float32)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=there, other=0.0).to(tl.float32) * LOG2_E
    return sink


@triton.jit(
    do_not_specialize=["stride_pages", "splits"],
    do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr"],  # parts of one buffer
)
def decode_kernel(
    q_ptr,  # [rows, heads, HEAD_DIM], rows `stride_row` apart
    k_ptr,  # [pages, PAGE_SIZE, KV heads, HEAD_DIM], as v_ptr; of e4m3 perhaps its bits (`readable`)
    v_ptr,
    out_ptr,  # [rows, heads, HEAD_DIM], or float32 [rows, heads, splits, HEAD_DIM] where there are several splits
    lse_ptr,  # float32 [rows, heads, splits]; with a list both are of [splits in the list, heads]
    merged_ptr,  # as `out_ptr` of one split: where the last split of a row to end merges all
    ended_ptr,  # int32 [rows, KV heads]: how many splits have ended, 0 before and after; none where a kernel merges
    listed_ptr,  # int32 [splits in the list, 4] (`listed`), or none, and each row has `splits`
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
    SEVERAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One split of one row and KV head; SEVERAL of a row are merged, by the last of them or afterwards."""
    kv_head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    pdl_wait(EARLY)
    row, split, used, share, kv_len = taken(listed_ptr, kv_lens_ptr, row, split, WINDOW, splits, BLOCK_N)
    index = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + index
    if split >= used:
        leave_empty(lse_ptr, ended_ptr, row * tl.num_programs(0) * GROUP + head, splits, split, index < GROUP)
        return
    dim = tl.arange(0, BLOCK_D)
    mine = (index < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * stride_row + head[:, None] * HEAD_DIM + dim[None, :], mask=mine, other=0.0)
    attend_split(
        q, row, kv_head, split, used, share, kv_len, k_ptr, v_ptr, out_ptr, lse_ptr, merged_ptr, ended_ptr, listed_ptr,
        sinks_ptr, pages_ptr + row * stride_pages, splits, scale, GROUP, HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, SEVERAL,
        BLOCK_N, EARLY,
    )  # fmt: skip


@triton.jit
def attend_split(
    q,  # [M, D]: the query heads of one row and KV head, zeros where there is none
    row,
    kv_head,
    split,
    used,
    share,
    kv_len,
    k_ptr,  # what is not told here is as in `decode_kernel`
    v_ptr,
    out_ptr,
    lse_ptr,
    merged_ptr,
    ended_ptr,
    listed_ptr,
    sinks_ptr,
    pages_ptr,  # of this row
    splits,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SEVERAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One split of those `used`, `share` keys of one row and KV head: what `decode_kernel` does with its q."""
    first = first_seen(kv_len, WINDOW) + split * share
    last = tl.minimum(first + share, kv_len)
    index, dim = tl.arange(0, q.shape[0]), tl.arange(0, q.shape[1])
    head = kv_head * GROUP + index
    mine = (index < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    acc, top, total = nothing_seen(q.shape[0], q.shape[1])
    k_at, v_at = k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM
    acc, top, total = _stream(
        q, acc, top, total, index, k_at, v_at, pages_ptr, tl.num_programs(0), first, last, scale,
        HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, False, BLOCK_N,
    )  # fmt: skip
    pdl_launch_next(EARLY)
    row_head = row * tl.num_programs(0) * GROUP + head
    merged_at = merged_ptr + row_head[:, None] * HEAD_DIM + dim[None, :]
    alone = used == 1 if ended_ptr is not None else not SEVERAL
    if alone:
        out = _with_sink(acc, top, total, _sinks(sinks_ptr, head, index < GROUP))
        tl.store(merged_at, out.to(merged_ptr.dtype.element_ty), mask=mine)
    else:
        places, apart = split_places(listed_ptr, head, row_head, tl.num_programs(0) * GROUP, splits, split)
        place = places + split * apart
        tl.store(lse_ptr + place, top + tl.log2(total), mask=index < GROUP)
        tl.store(out_ptr + place[:, None] * HEAD_DIM + dim[None, :], acc / total[:, None], mask=mine)
        if ended_ptr is not None:
            ended_at = ended_ptr + row * tl.num_programs(0) + kv_head
            sink = _sinks(sinks_ptr, head, index < GROUP)
            merge_if_last(ended_at, out_ptr, lse_ptr, merged_ptr, row_head, places, apart, used, sink, mine, HEAD_DIM)


@triton.jit
def leave_empty(lse_ptr, ended_ptr, row_head, splits, split, there):
    """What a split without keys has to say of some heads: nothing, to those that merge only the splits in use."""
    if ended_ptr is None:
        tl.store(lse_ptr + row_head * splits + split, tl.full(row_head.shape, NOTHING, tl.float32), mask=there)


@triton.jit
def merge_if_last(
    ended_at, parts_ptr, lse_ptr, merged_ptr, row_head, places, apart, used, sink, mine, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Count a split of some heads as ended; the last of those `used` merges all, and leaves the count as it was."""
    tl.debug_barrier()  # one thread counts, and tells others of what all threads of this program have stored
    if tl.atomic_add(ended_at, 1, sem="acq_rel") == used - 1:
        tl.store(ended_at, 0)
        out = _merged(parts_ptr, lse_ptr, places, apart, used, sink, mine, HEAD_DIM)
        out_at = merged_ptr + row_head[:, None] * HEAD_DIM + tl.arange(0, mine.shape[1])[None, :]
        tl.store(out_at, out.to(merged_ptr.dtype.element_ty), mask=mine)


@triton.jit
def _merged(parts_ptr, lse_ptr, places, apart, used, sink, mine, HEAD_DIM: tl.constexpr):
    """The splits of some heads [M], weighed by how much of the softmax each has: [M, D]. Others have written them."""
    dim = tl.arange(0, mine.shape[1])
    there = tl.max(mine.to(tl.int32), 1) > 0
    highest = sink
    for split in tl.range(used):
        lse = tl.load(lse_ptr + places + split * apart, mask=there, other=NOTHING, cache_modifier=".cg")
        highest = tl.maximum(highest, lse)
    highest = tl.where(highest == NOTHING, 0.0, highest)  # of a row of the tile that is no head
    total = tl.exp2(sink - highest)
    out = tl.zeros(mine.shape, tl.float32)
    for split in tl.range(used):
        place = places + split * apart
        weight = tl.exp2(tl.load(lse_ptr + place, mask=there, other=NOTHING, cache_modifier=".cg") - highest)
        at = parts_ptr + place[:, None] * HEAD_DIM + dim[None, :]
        out += weight[:, None] * tl.load(at, mask=mine, other=0.0, cache_modifier=".cg")
        total += weight
    return out / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def listed(listed_ptr):
    """(row, split, splits of the row, keys of each but the last) of this program; it has none where splits are 0."""
    at = listed_ptr + tl.program_id(2) * 4
    return tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def taken(listed_ptr, kv_lens_ptr, row, split, WINDOW: tl.constexpr, splits, BLOCK_N: tl.constexpr):
    """(row, split, splits of the row in use, keys of each but the last, of all): by the list, if there is one."""
    if listed_ptr is not None:
        row, split, used, share = listed(listed_ptr)
        kv_len = tl.load(kv_lens_ptr + row)
    else:
        kv_len = tl.load(kv_lens_ptr + row)
        used, share = even_splits(kv_len, WINDOW, splits, BLOCK_N)
    return row, split, used, share, kv_len


@triton.jit
def first_seen(kv_len, WINDOW: tl.constexpr):
    """The first key that a row's last token sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(kv_len - WINDOW, 0)
    return first


@triton.jit
def even_splits(kv_len, WINDOW: tl.constexpr, splits, BLOCK_N: tl.constexpr):
    """(splits in use of a row, keys of each but the last), if `splits` are as even as blocks allow."""
    seen = kv_len - first_seen(kv_len, WINDOW)
    share = tl.cdiv(tl.cdiv(seen, splits), BLOCK_N) * BLOCK_N
    return tl.cdiv(seen, share), share


@triton.jit
def split_places(listed_ptr, head, row_head, heads, splits, split):
    """(where the first split of each head is kept, how far the next is from there)."""
    places, apart = row_head * splits, 1
    if listed_ptr is not None:
        places, apart = (tl.program_id(2).to(tl.int64) - split) * heads + head, heads
    return places, apart


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
    EARLY: tl.constexpr,
):
    """The splits of one row and head, weighed by how much of the softmax each has."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, BLOCK_D)
    pdl_wait(EARLY)
    lse = tl.load(lse_ptr + place * SPLITS + split)
    pdl_launch_next(EARLY)
    highest = tl.max(lse, 0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + place % heads).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    weights = tl.exp2(lse - highest)
    total = tl.sum(weights, 0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - highest)
    at = parts_ptr + (place * SPLITS + split)[:, None] * HEAD_DIM + dim[None, :]
    parts = tl.load(at, mask=(lse != NOTHING)[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out_ptr + place * HEAD_DIM + dim, out.to(out_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(
    do_not_specialize=["stride_pages"],
    do_not_specialize_on_alignment=["pages_ptr", "kv_lens_ptr", "query_start_ptr"],
)
def extend_kernel(
    q_ptr,  # [tokens, heads, HEAD_DIM], tokens `stride_row` apart
    k_ptr,  # [pages, PAGE_SIZE, KV heads, HEAD_DIM], as v_ptr
    v_ptr,
    out_ptr,  # [tokens, heads, HEAD_DIM]
    sinks_ptr,
    pages_ptr,
    kv_lens_ptr,
    query_start_ptr,
    tiles_ptr,  # int32 [tiles, 2]: a row, and the first of its new tokens in this tile
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
    EARLY: tl.constexpr,
):
    """BLOCK_M // GROUP new tokens of one row, with all query heads of one KV head."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    pdl_wait(EARLY)
    tile_at = tiles_ptr + tl.program_id(0) * 2
    row, offset = tl.load(tile_at), tl.load(tile_at + 1)
    kv_heads, kv_head = tl.num_programs(1), tl.program_id(1)
    start = tl.load(query_start_ptr + row)
    count = tl.load(query_start_ptr + row + 1) - start
    kv_len = tl.load(kv_lens_ptr + row)
    index, dim = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = offset + index // GROUP
    head = kv_head * GROUP + index % GROUP
    mine = ((index < QUERIES * GROUP) & (query < count))[:, None] & (dim < HEAD_DIM)[None, :]
    token = (start + query).to(tl.int64)
    q_at = q_ptr + token[:, None] * stride_row + head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(q_at, mask=mine, other=0.0)
    position = kv_len - count + query
    earliest = kv_len - count + offset
    first = tl.maximum(earliest - WINDOW + 1, 0) if WINDOW > 0 else 0
    last = tl.minimum(earliest + QUERIES, kv_len)
    plain = first if WINDOW > 0 else (earliest + 1) // BLOCK_N * BLOCK_N  # where keys begin that not every query sees
    acc, top, total = nothing_seen(BLOCK_M, BLOCK_D)
    k_at, v_at = k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM
    pages_at = pages_ptr + row.to(tl.int64) * stride_pages
    if WINDOW == 0:
        acc, top, total = _stream(
            q, acc, top, total, position, k_at, v_at, pages_at, kv_heads, first, plain, scale,
            HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, False, BLOCK_N,
        )  # fmt: skip
    acc, top, total = _stream(
        q, acc, top, total, position, k_at, v_at, pages_at, kv_heads, plain, last, scale,
        HEAD_DIM, PAGE_SIZE, WINDOW, SOFTCAP, True, BLOCK_N,
    )  # fmt: skip
    pdl_launch_next(EARLY)
    out = _with_sink(acc, top, total, _sinks(sinks_ptr, head, index < QUERIES * GROUP))
    place = (token[:, None] * kv_heads * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mine)
