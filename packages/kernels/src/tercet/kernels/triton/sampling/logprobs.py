"""Log-probabilities from logits of any dtype, for any rows, without copying them.

The reference is `tercet.kernels.ops.logprobs.token_logprobs`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import Tiling, cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch
from tercet.kernels.triton.sampling.argmax import TILINGS as ARGMAX_TILINGS
from tercet.kernels.triton.sampling.argmax import top_candidates

TILINGS = ARGMAX_TILINGS
"""Tilings by logits of one row, as for argmax, which has the same loads. The first is in use."""


@triton.jit
def partial_sum_kernel(
    logits_ptr, rows_ptr, highest_ptr, sum_ptr, vocab, stride, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Compute the largest logit of one block of one row, and the sum of exponentials relative to it."""
    index = tl.program_id(0).to(tl.int64)
    row = index
    pdl_wait(PDL)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    pdl_launch_next(PDL)
    highest = tl.max(logits, 0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    at = index * tl.num_programs(1) + tl.program_id(1)
    tl.store(highest_ptr + at, highest)
    tl.store(sum_ptr + at, tl.sum(tl.exp(logits - base), 0))


@triton.jit
def logsumexp_kernel(
    logits_ptr, rows_ptr, tokens_ptr, highest_ptr, sum_ptr, total_ptr, chosen_ptr, stride, blocks,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute log(sum(exp(logits))) of one row, and the log-probability of its token."""
    index = tl.program_id(0).to(tl.int64)
    row = index
    pdl_wait(PDL)
    pdl_launch_next(PDL)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index)
    block = tl.arange(0, BLOCK)
    highest = tl.load(highest_ptr + index * blocks + block, mask=block < blocks, other=float("-inf"))
    sums = tl.load(sum_ptr + index * blocks + block, mask=block < blocks, other=0.0)
    most = tl.max(highest, 0)
    base = tl.where(most == float("-inf"), 0.0, most)
    total = base + tl.log(tl.sum(sums * tl.exp(highest - base), 0))
    chosen = tl.load(logits_ptr + row * stride + tl.load(tokens_ptr + index)).to(tl.float32)
    tl.store(total_ptr + index, total)
    tl.store(chosen_ptr + index, chosen - total)


def token_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    top: int,
    rows: torch.Tensor | None = None,
    *,
    tiling: Tiling = TILINGS[0],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities as in the reference, for a `top` of a few tens at most."""
    count, vocab = len(tokens), logits.shape[1]
    blocks = cdiv(vocab, tiling.block)
    highest = torch.empty(count, blocks, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(highest)
    total = torch.empty(count, dtype=torch.float32, device=logits.device)
    chosen = torch.empty_like(total)
    stride, pdl = logits.stride(0), pdl_options(logits.device)
    summed = logits, rows, highest, sums
    options = {"BLOCK": tiling.block, "num_warps": tiling.warps, **pdl}
    launch(partial_sum_kernel, (count, blocks), summed, (vocab, stride), **options)
    given = logits, rows, tokens, highest, sums, total, chosen
    launch(logsumexp_kernel, (count,), given, (stride, blocks), BLOCK=power_of_two(blocks), **pdl)
    if not top:
        empty = logits.new_empty((count, 0))
        return chosen, empty.long(), empty.float()
    values, ids = top_candidates(logits, top, rows)
    return chosen, ids, values.float() - total[:, None]
