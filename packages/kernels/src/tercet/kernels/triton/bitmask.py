"""Grammar masks, in place. The reference is `tercet.kernels.ops.bitmask.apply_bitmask`."""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def bitmask_kernel(logits_ptr, mask_ptr, vocab, stride, stride_mask, BLOCK: tl.constexpr):
    """-inf over the tokens of one block whose bit is zero; the others are not touched."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(mask_ptr + row * stride_mask + token // 32, mask=token < vocab, other=-1)
    forbidden = (word >> (token % 32)) & 1 == 0
    at = logits_ptr + row * stride + token
    tl.store(at, tl.full([BLOCK], float("-inf"), logits_ptr.dtype.element_ty), mask=forbidden & (token < vocab))


def apply_bitmask_(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """As the reference, into the logits themselves, which are returned."""
    rows, vocab = logits.shape
    if len(bitmask) != rows or bitmask.shape[1] * 32 < vocab or logits.stride(1) != 1 or bitmask.stride(1) != 1:
        raise ValueError(f"a mask {list(bitmask.shape)} does not cover logits {list(logits.shape)}")
    grid = (rows, triton.cdiv(vocab, _BLOCK))
    bitmask_kernel[grid](logits, bitmask, vocab, logits.stride(0), bitmask.stride(0), BLOCK=_BLOCK)
    return logits
