"""Candidates of filtered draws: the likeliest tokens of each row, collected in one read of all logits.

A sample of a row says above which logit, its *cut*, as many tokens lie as are wanted. Every block of the vocabulary
appends its tokens from there on to the row's list, and computes its largest logit and the sum of its weights. Lists are
in no order. A row whose list is too short or does not fit is drawn from all of its tokens (`filters`).
"""

import triton
import triton.language as tl

from tercet.kernels.triton.launch import pdl_launch_next, pdl_wait
from tercet.kernels.triton.sampling.scores import NEVER, highest_in, sharpness

RUNS, RUN = tl.constexpr(64), tl.constexpr(64)
"""Runs of a row's sample, and tokens of each: neighbors are read at once."""
_STEPS = tl.constexpr(12)
"""Halvings of the range of sampled logits."""
_LEAST = tl.constexpr(256)
"""Candidates for the smallest top-k, of which a sample gives the number within a half."""


@triton.jit(do_not_specialize=["top_k_ptr"])
def cut_kernel(
    logits_ptr, top_k_ptr,
    cuts_ptr,  # float32 [rows]: -inf if all tokens are wanted
    counts_ptr,  # int32 [rows], set to 0
    vocab, stride,
    CAPACITY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Estimate the logit above which lie 256 tokens and two for each of top-k, or 5/8 of the capacity without top-k."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, RUNS * RUN)
    token = lane // RUN * tl.maximum(vocab // RUNS, RUN) + lane % RUN
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER).to(tl.float32)
    top_k, wanted = tl.load(top_k_ptr + row), tl.full([], CAPACITY * 5 // 8, tl.int64)
    wanted = tl.where(top_k > 0, tl.minimum(wanted, 2 * top_k + _LEAST), wanted)
    rank = wanted.to(tl.float32) * tl.sum((token < vocab).to(tl.int32), 0) / vocab
    finite = tl.abs(logits) < float("inf")
    low, high = tl.min(tl.where(finite, logits, float("inf")), 0), tl.max(tl.where(finite, logits, NEVER), 0)
    cut = tl.full([], NEVER, tl.float32)
    if tl.sum(finite.to(tl.int32), 0) > rank:
        for _ in range(_STEPS):
            middle = low * 0.5 + high * 0.5
            enough = tl.sum((logits >= middle).to(tl.int32), 0) >= rank
            low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
        cut = low
    tl.store(cuts_ptr + row, cut)
    tl.store(counts_ptr + row, 0)


@triton.jit(do_not_specialize=["temperature_ptr"])
def collect_kernel(
    logits_ptr, temperature_ptr, cuts_ptr, counts_ptr,
    tokens_ptr,  # int32 [rows, CAPACITY]: output, the candidates
    values_ptr,  # float32 [rows, CAPACITY]: output, their logits
    bests_ptr,  # float32 [rows, blocks]: output, the largest logit of each block
    sums_ptr,  # float32 [rows, blocks]: output, the sum of exp((logit - largest logit) / temperature)
    vocab, stride, blocks,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Append the candidates of one block of one row to its list, and add up its weights."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = block * BLOCK + tl.arange(0, BLOCK)
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=NEVER).to(tl.float32)
    highest = highest_in(logits)
    base = tl.where(highest == NEVER, 0.0, highest)
    weights = tl.exp2((logits - base) * sharpness(tl.load(temperature_ptr + row)))
    tl.store(bests_ptr + row * blocks + block, highest)
    tl.store(sums_ptr + row * blocks + block, tl.sum(weights, 0))
    cut = tl.load(cuts_ptr + row)
    if highest >= cut:
        chosen = ((logits >= cut) & (logits > NEVER)).to(tl.int32)
        first = tl.atomic_add(counts_ptr + row, tl.sum(chosen, 0), sem="relaxed")
        place = first + tl.cumsum(chosen, 0) - chosen
        there = (chosen > 0) & (place < CAPACITY)
        tl.store(tokens_ptr + row * CAPACITY + place, token, mask=there)
        tl.store(values_ptr + row * CAPACITY + place, logits, mask=there)
