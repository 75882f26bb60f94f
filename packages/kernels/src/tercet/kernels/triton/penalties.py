"""Penalties for repetition, in place and only of the rows that have them.

The reference is `tercet.kernels.ops.penalties.apply_penalties`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.penalties import Penalties

_BLOCK = 2048


@triton.jit
def penalties_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    prompt_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab,
    stride,
    BLOCK: tl.constexpr,
):
    """One block of the logits at rows[i], by counts and strengths i."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab
    at = logits_ptr + tl.load(rows_ptr + index) * stride + token
    logits = tl.load(at, mask=there, other=0.0).to(tl.float32)
    count = tl.load(counts_ptr + index * vocab + token, mask=there, other=0)
    in_prompt = tl.load(prompt_ptr + index * vocab + token, mask=there, other=0) != 0
    said = count > 0
    repetition = tl.load(repetition_ptr + index)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(said | in_prompt, repeated, logits)
    logits = logits - tl.load(frequency_ptr + index) * count.to(tl.float32)
    logits = logits - tl.load(presence_ptr + index) * said.to(tl.float32)
    tl.store(at, logits.to(logits_ptr.dtype.element_ty), mask=there)


def apply_penalties_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_seen: torch.Tensor,
    penalties: Penalties,
) -> None:
    """As the reference, into logits[rows]: `rows` int64 [n]; counts, prompt and strengths have one entry for each."""
    if logits.stride(1) != 1 or not output_counts.is_contiguous() or not prompt_seen.is_contiguous():
        raise ValueError("penalties need contiguous rows")
    vocab = logits.shape[1]
    penalties_kernel[len(rows), triton.cdiv(vocab, _BLOCK)](
        logits,
        rows,
        output_counts.int(),
        prompt_seen.view(torch.uint8),
        penalties.repetition.contiguous(),
        penalties.frequency.contiguous(),
        penalties.presence.contiguous(),
        vocab,
        logits.stride(0),
        BLOCK=_BLOCK,
    )
