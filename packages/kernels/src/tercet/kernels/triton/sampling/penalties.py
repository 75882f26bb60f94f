"""Repetition, frequency and presence penalties, in place, for selected rows.

The reference is `tercet.kernels.ops.penalties.apply_penalties_`.
"""

import torch
import triton
import triton.language as tl

from tercet.kernels.ops.penalties import Penalties, TokenCounts
from tercet.kernels.triton.launch import cdiv
from tercet.kernels.triton.launch_cache import launch

_BLOCK = 2048


@triton.jit(
    do_not_specialize_on_alignment=[  # views of a buffer with varying lengths
        "rows_ptr",
        "sequences_ptr",
        "repetition_ptr",
        "frequency_ptr",
        "presence_ptr",
    ]
)
def penalties_kernel(
    logits_ptr,
    rows_ptr,
    counts_ptr,
    prompt_ptr,
    sequences_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab,
    stride,
    stride_strength,
    BLOCK: tl.constexpr,
):
    """Penalize one block of the logits at rows[i], by the counts of sequences[i] and penalties i."""
    index = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = token < vocab
    at = logits_ptr + tl.load(rows_ptr + index) * stride + token
    logits = tl.load(at, mask=there, other=0.0).to(tl.float32)
    known = tl.load(sequences_ptr + index) * vocab + token
    count = tl.load(counts_ptr + known, mask=there, other=0)
    in_prompt = tl.load(prompt_ptr + known, mask=there, other=0) != 0
    in_output = count > 0
    repetition = tl.load(repetition_ptr + index * stride_strength)
    repeated = tl.where(logits > 0, tl.div_rn(logits, repetition), logits * repetition)
    logits = tl.where(in_output | in_prompt, repeated, logits)
    logits = logits - tl.load(frequency_ptr + index * stride_strength) * count.to(tl.float32)
    logits = logits - tl.load(presence_ptr + index * stride_strength) * in_output.to(tl.float32)
    tl.store(at, logits.to(logits_ptr.dtype.element_ty), mask=there)


def apply_penalties_(
    logits: torch.Tensor, rows: torch.Tensor, counts: TokenCounts, sequences: torch.Tensor, penalties: Penalties
) -> None:
    """Penalize logits in place, without copying rows or counts."""
    strengths = penalties.repetition, penalties.frequency, penalties.presence
    apart = strengths[0].stride(0)
    if logits.stride(1) != 1 or not counts.output.is_contiguous() or not counts.prompt.is_contiguous():
        raise ValueError("penalties need contiguous rows")
    if any(strength.stride(0) != apart for strength in strengths):
        raise ValueError("the strengths of penalties lie equally far apart")
    vocab = logits.shape[1]
    launch(
        penalties_kernel,
        (len(rows), cdiv(vocab, _BLOCK)),
        (logits, rows, counts.output, counts.prompt.view(torch.uint8), sequences, *strengths),
        (vocab, logits.stride(0), apart),
        BLOCK=_BLOCK,
    )
