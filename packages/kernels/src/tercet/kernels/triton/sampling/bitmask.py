"""Grammar masks, in place. The reference is `tercet.kernels.ops.bitmask.apply_bitmask`.

A byte of a mask covers eight logits, which are one vector of the kernel. The vector is untouched if the byte allows all
of them, as mostly in rows without a grammar; written but not read if it allows none, as mostly in rows with one; and
read and written otherwise.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def bitmask_kernel(
    logits_ptr,
    bytes_ptr,  # uint8 [rows, ceil(vocab / 8) or more]: token t is bit t % 8 of byte t // 8
    vocab,
    stride,
    stride_bytes,
    WHOLE: tl.constexpr,  # `vocab` is a multiple of eight
    BLOCK: tl.constexpr,
):
    """Write -inf for the tokens of one block whose bit is zero; other logits stay."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)
    allowed = tl.load(bytes_ptr + row * stride_bytes + byte, mask=byte * 8 < vocab, other=0xFF)
    token = byte[:, None] * 8 + bit[None, :]
    written = (allowed != 0xFF)[:, None]  # equal for all eight, so that they can be one vector
    read = ((allowed != 0xFF) & (allowed != 0))[:, None]
    if not WHOLE:
        written, read = written & (token < vocab), read & (token < vocab)
    at = logits_ptr + row * stride + token
    logits = tl.load(at, mask=read).to(tl.float32)  # masked lanes are not used
    forbidden = (allowed[:, None] >> bit[None, :]) & 1 == 0
    tl.store(at, tl.where(forbidden, float("-inf"), logits), mask=written)


def apply_bitmask_(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Mask logits in place and return them."""
    rows, vocab = logits.shape
    if len(bitmask) != rows or bitmask.shape[1] * 32 < vocab or logits.stride(1) != 1 or bitmask.stride(1) != 1:
        raise ValueError(f"a mask {list(bitmask.shape)} does not cover logits {list(logits.shape)}")
    given = bitmask.view(torch.uint8)  # little-endian: the lowest bits of a word come first
    grid = (rows, triton.cdiv(vocab, _BLOCK))
    sizes = (vocab, logits.stride(0), given.stride(0))
    bitmask_kernel[grid](logits, given, *sizes, WHOLE=vocab % 8 == 0, BLOCK=_BLOCK)
    return logits
