"""Embedding lookup. The reference is `torch.nn.functional.embedding`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import Tiling, cdiv, pdl_launch_next, pdl_options, pdl_wait, power_of_two
from tercet.kernels.triton.launch_cache import launch

TILINGS = (
    Tiling(2048, 4),
    Tiling(1024, 4),
    Tiling(1024, 2),
    Tiling(2048, 2),
    Tiling(2048, 8),
    Tiling(4096, 4),
    Tiling(4096, 8),
    Tiling(8192, 8),
    Tiling(8192, 16),
)
"""Tilings by elements of a vector, or of several short ones. The first is in use."""


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ids_ptr"])
def embedding_kernel(
    ids_ptr, weight_ptr, out_ptr, tokens, vocab, size, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Copy one block of the vectors of some tokens; ids outside the vocabulary give zeros."""
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    pdl_wait(PDL)
    row = tl.load(ids_ptr + token, mask=token < tokens, other=-1).to(tl.int64)
    known = ((row >= 0) & (row < vocab))[:, None]
    vector = tl.load(weight_ptr + row[:, None] * size + column, mask=known & (column < size), other=0.0)
    pdl_launch_next(PDL)
    tl.store(out_ptr + token[:, None] * size + column, vector, mask=(token < tokens)[:, None] & (column < size))


def embedding(ids: torch.Tensor, weight: torch.Tensor, *, tiling: Tiling = TILINGS[0]) -> torch.Tensor:
    """Return weight[ids]: [tokens] -> [tokens, size]."""
    vocab, size = weight.shape
    tokens = len(ids)
    out = torch.empty(tokens, size, dtype=weight.dtype, device=weight.device)
    block = min(tiling.block, power_of_two(size))
    rows = tiling.block // block
    launch(
        embedding_kernel,
        (cdiv(tokens, rows), cdiv(size, block)),
        (ids, weight, out),
        (tokens, vocab, size),
        ROWS=rows,
        BLOCK=block,
        num_warps=tiling.warps,
        **pdl_options(weight.device),
    )
    return out
