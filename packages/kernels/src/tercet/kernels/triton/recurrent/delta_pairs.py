"""Products of the queries and keys of a chunk with its earlier keys, which decay by channel in between.

The decay from one token to another is no product of a factor for each, unless both are bounded: exp(-sum) of a strong
decay overflows. A program therefore has a block of tokens. Earlier blocks are decayed up to its beginning, and its own
tokens from there, both by factors up to 1, so that these products are matrix products. Within the block, the factor of
each pair is computed alone.
"""

import triton
import triton.language as tl

from tercet.kernels.triton.recurrent.sequences import channel_decays_of, normalized_of


@triton.jit(do_not_specialize=["q_stride", "k_stride"])
def delta_pairs_kernel(
    q_ptr,
    k_ptr,
    decay_ptr,
    system_ptr,
    scores_ptr,
    chunks_ptr,
    q_stride,
    k_stride,
    scale,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    KEY: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write the rows of BLOCK tokens of keys by keys (`system`) and queries by keys (`scores`), up to the diagonal."""
    begin = tl.load(chunks_ptr + 4 * tl.program_id(0))
    end = tl.load(chunks_ptr + 4 * tl.program_id(0) + 1)
    head, block = tl.program_id(1), tl.program_id(2)
    number, row = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    first = begin + block * BLOCK
    if first < end:
        token = first + number
        known, rows = token < end, row < KEY
        key_at = head // SHARE * KEY
        q = normalized_of(q_ptr + key_at, token, known, row, rows, q_stride) * scale
        k = normalized_of(k_ptr + key_at, token, known, row, rows, k_stride)
        since, _ = channel_decays_of(decay_ptr, token, known, head, row, rows, HEADS, KEY)
        at = (token * HEADS + head)[:, None] * TOKENS + number[None, :]
        left_k, left_q = k * tl.exp(since), q * tl.exp(since)
        between = tl.zeros([BLOCK_K], tl.float32)
        for back in range(1, block + 1):
            earlier = token - back * BLOCK
            there = earlier >= begin
            total, whole = channel_decays_of(decay_ptr, earlier, there, head, row, rows, HEADS, KEY)
            keys = normalized_of(k_ptr + key_at, earlier, there, row, rows, k_stride)
            keys = tl.trans(keys * tl.exp((between + whole)[None, :] - total))
            column = (block - back) * BLOCK
            system = tl.dot(left_k, keys, input_precision="tf32x3")
            scores = tl.dot(left_q, keys, input_precision="tf32x3")
            tl.store(system_ptr + at + column, system, mask=known[:, None])
            tl.store(scores_ptr + at + column, scores, mask=known[:, None])
            between += whole
        out_at = (token * HEADS + head) * TOKENS + block * BLOCK
        for index in range(tl.minimum(end - first, BLOCK)):
            mine = (number == index)[:, None]
            key = tl.sum(tl.where(mine, k, 0.0), 0)
            until = tl.sum(tl.where(mine, since, 0.0), 0)
            later = known & (number >= index)
            decayed = key[None, :] * tl.exp(tl.where(later[:, None], since - until[None, :], float("-inf")))
            tl.store(system_ptr + out_at + index, tl.sum(k * decayed, 1), mask=later)
            tl.store(scores_ptr + out_at + index, tl.sum(q * decayed, 1), mask=later)
