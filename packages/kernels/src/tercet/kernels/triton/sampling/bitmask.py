"""Grammar masks, in place. The reference is `tercet.kernels.ops.bitmask.apply_bitmask`.

A byte of a mask says what becomes of eight logits. They are one vector to the kernel: it is left alone where the byte
allows all of them, as it mostly does in rows without a grammar, written but not read where it allows none, as it mostly
does in rows with one, and read and written only where some are allowed.
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
    WHOLE: tl.constexpr,  # whether `vocab` is a multiple of eight
    BLOCK: tl.constexpr,
):
    """-inf over the tokens of one block whose bit is zero; the others keep their logits."""
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    bit = tl.arange(0, 8)
    allowed = tl.load(bytes_ptr + row * stride_bytes + byte, mask=byte * 8 < vocab, other=0xFF)
    token = byte[:, None] * 8 + bit[None, :]
    written = (allowed != 0xFF)[:, None]  # the same for all eight, which lets them be one vector
    read = ((allowed != 0xFF) & (allowed != 0))[:, None]
    if not WHOLE:
        written, read = written & (token < vocab), read & (token < vocab)
    at = logits_ptr + row * stride + token
    logits = tl.load(at, mask=read).to(tl.float32)  # nobody reads what stands for the others
    forbidden = (allowed[:, None] >> bit[None, :]) & 1 == 0
    tl.store(at, tl.where(forbidden, float("-inf"), logits), mask=written)


def apply_bitmask_(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """As the reference, into the logits themselves, which are returned."""
    rows, vocab = logits.shape
    if len(bitmask) != rows or bitmask.shape[1] * 32 < vocab or logits.stride(1) != 1 or bitmask.stride(1) != 1:
        raise ValueError(f"a mask {list(bitmask.shape)} does not cover logits {list(logits.shape)}")
    given = bitmask.view(torch.uint8)  # little-endian: so the lowest bits of a word come first
    grid = (rows, triton.cdiv(vocab, _BLOCK))
    sizes = (vocab, logits.stride(0), given.stride(0))
    bitmask_kernel[grid](logits, given, *sizes, WHOLE=vocab % 8 == 0, BLOCK=_BLOCK)
    return logits
