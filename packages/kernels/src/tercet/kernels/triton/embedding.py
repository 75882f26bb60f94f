"""Rows of an embedding. The reference is `torch.nn.functional.embedding`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import await_previous, early_start, release_next

_BLOCK = 1024


@triton.jit
def embedding_kernel(ids_ptr, weight_ptr, out_ptr, vocab, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One block of one token's vector; an id that is not in the vocabulary gives zeros."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_previous(EARLY)
    row = tl.load(ids_ptr + token).to(tl.int64)
    known = (row >= 0) & (row < vocab)
    vector = tl.load(weight_ptr + row * size + column, mask=known & (column < size), other=0.0)
    release_next(EARLY)
    tl.store(out_ptr + token * size + column, vector, mask=column < size)


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """weight[ids]: [tokens] -> [tokens, size]."""
    vocab, size = weight.shape
    out = torch.empty(len(ids), size, dtype=weight.dtype, device=weight.device)
    early = early_start(weight.device)
    embedding_kernel[len(ids), triton.cdiv(size, _BLOCK)](ids, weight, out, vocab, size, BLOCK=_BLOCK, **early)
    return out
