"""The largest logits of each row. The references are in `tercet.kernels.ops.sampling`."""

import torch
import triton
import triton.language as tl

from tercet.kernels.triton.launch import power_of_two
from tercet.kernels.triton.ordering import key_of, token_of

_BLOCK = 4096


@triton.jit
def best_of_block_kernel(logits_ptr, rows_ptr, keys_ptr, vocab, stride, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The COUNT largest keys of one block of one row, in order; those that there are not are negative."""
    index = tl.program_id(0).to(tl.int64)
    row = index
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    nothing = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(token < vocab, key_of(logits, token, vocab), nothing)
    at = keys_ptr + (index * tl.num_programs(1) + tl.program_id(1)) * COUNT
    for place in tl.range(COUNT):
        best = tl.max(keys, 0)
        tl.store(at + place, best)
        keys = tl.where(keys == best, nothing, keys)


@triton.jit
def best_of_row_kernel(logits_ptr, keys_ptr, tokens_ptr, values_ptr, vocab, stride, blocks, BLOCK: tl.constexpr):
    """The largest of the best of all blocks: its token and its logit."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK)
    keys = tl.load(keys_ptr + row * blocks + index, mask=index < blocks, other=-0x7FFFFFFFFFFFFFFF)
    token = token_of(tl.max(keys, 0), vocab)
    tl.store(tokens_ptr + row, token)
    tl.store(values_ptr + row, tl.load(logits_ptr + row * stride + token))


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference: (the largest logit of each row [rows], its token int64 [rows])."""
    rows, vocab = logits.shape
    keys = best_of_blocks(logits, 1)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    values = torch.empty(rows, dtype=logits.dtype, device=logits.device)
    blocks = keys.shape[1]
    best_of_row_kernel[(rows,)](
        logits, keys, tokens, values, vocab, logits.stride(0), blocks, BLOCK=power_of_two(blocks)
    )
    return values, tokens


def top_candidates(
    logits: torch.Tensor, width: int, rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference, for a `width` of a few tens at most: the kernel takes them one by one. Of all rows, or some."""
    vocab = logits.shape[1]
    keys = best_of_blocks(logits, min(width, _BLOCK), rows).flatten(1)
    best = keys.topk(min(width, vocab), -1).values
    ids = vocab - 1 - (best & 0xFFFFFFFF)
    return (logits.gather(1, ids) if rows is None else logits[rows[:, None], ids]), ids


def best_of_blocks(logits: torch.Tensor, count: int, some: torch.Tensor | None = None) -> torch.Tensor:
    """int64 [rows, blocks, count]: the best of every block, of all rows or of some."""
    rows, vocab = len(logits) if some is None else len(some), logits.shape[1]
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    blocks = triton.cdiv(vocab, _BLOCK)
    keys = torch.empty(rows, blocks, count, dtype=torch.int64, device=logits.device)
    best_of_block_kernel[rows, blocks](logits, some, keys, vocab, logits.stride(0), COUNT=count, BLOCK=_BLOCK)
    return keys
