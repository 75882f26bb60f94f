"""Parts of encoders of text: a whole text at once, whose tokens see each other, without a KV cache.

On a CPU the work of a layer is done some rows at a time, and pauses in between (see `time_slices`).
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.attention.api import AttentionParams
from tercet.scheduler.device.time_slices import pause, rows_of_part

_SCORES = 1 << 24
"""Attention scores that a GPU computes at once."""


class TextEncoder(Protocol):
    """The encoder of a model with an encoder and a decoder of text."""

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [tokens, hidden] of token ids [tokens]."""
        ...


def by_rows(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, operations: int) -> torch.Tensor:
    """Return `compute(x)` [rows, ...] for x [rows, ...], which needs so many floating-point operations for a row."""
    rows = rows_of_part(operations) if x.device.type == "cpu" else len(x)
    parts = []
    for part in torch.split(x, rows):
        parts.append(compute(part))
        pause()
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_to_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Attend with q [tokens, heads, head_dim] to k and v [tokens, kv_heads, head_dim]; return q's shape.

    A window is the number of tokens that a token sees on either side.
    """
    tokens, heads, size = q.shape
    queries, keys, values = (each.transpose(0, 1) for each in (q, k, v))
    seen = min(tokens, 2 * params.window + 1) if params.window else tokens
    rows = rows_of_part(4 * heads * size * seen) if q.device.type == "cpu" else max(1, _SCORES // (heads * seen))
    parts = []
    for first in range(0, tokens, rows):
        last = min(first + rows, tokens)
        begin = max(0, first - params.window) if params.window else 0
        end = min(tokens, last + params.window) if params.window else tokens
        mask = None
        if params.window:
            places = torch.arange(begin, end, device=q.device)
            mask = (places - torch.arange(first, last, device=q.device)[:, None]).abs() <= params.window
        parts.append(_attended(queries[:, first:last], keys[:, begin:end], values[:, begin:end], mask, params))
        pause()
    return torch.cat(parts, 1).transpose(0, 1)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, params: AttentionParams
) -> torch.Tensor:
    """Attend with q [heads, tokens, head_dim] where `mask` [tokens, seen] allows it."""
    if not params.softcap:
        grouped = len(q) != len(k)
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=params.scale, enable_gqa=grouped
        )
        return out[0]
    shared = q.view(len(k), -1, *q.shape[1:])  # [kv_heads, heads of each, tokens, head_dim]
    scores = shared @ k[:, None].transpose(2, 3) * params.scale
    scores = (scores / params.softcap).tanh() * params.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v[:, None]).view_as(q)
