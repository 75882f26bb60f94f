"""Bitmasks of allowed tokens, as grammars produce them: one bit for each token, packed into int32."""

import torch


def apply_bitmask(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Return logits [rows, vocab] with -inf where the mask has a zero bit, as a new tensor.

    `bitmask` is int32 [rows, ceil(vocab / 32)]; token t is bit t % 32 of word t // 32, where bit 0 is the lowest.
    """
    return apply_bitmask_(logits.clone(), bitmask)


def apply_bitmask_(logits: torch.Tensor, bitmask: torch.Tensor) -> torch.Tensor:
    """Apply `apply_bitmask` in place and return `logits`."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    allowed = (bitmask[..., None] >> shifts & 1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill_(allowed == 0, float("-inf"))


def pack_bitmask(allowed: torch.Tensor) -> torch.Tensor:
    """Pack a bool tensor [rows, vocab] into an int32 mask."""
    rows, vocab = allowed.shape
    padded = torch.nn.functional.pad(allowed, (0, -vocab % 32)).view(rows, -1, 32)
    words = (padded.long() << torch.arange(32, device=allowed.device)).sum(-1)  # unsigned, in int64
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()
