"""A layout of heads that makes every rotary embedding half against half, over the whole head.

Kernels rotate elements i and i + head_dim / 2 of a head. Some models rotate only the first elements of each head, some
rotate adjacent elements. The rows of their projections are reordered at loading: elements that are rotated together
move half a head apart, and unrotated elements get a cosine of 1 and a sine of 0. Queries and keys are reordered
equally, so their products do not change.
"""

import torch
from torch.nn.functional import pad


def pad_to_heads(table: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Pad a table of `rope_cache` [positions, rotary_dim] for heads in `head_order` to [positions, head_dim]."""
    cos, sin = table.chunk(2, dim=1)
    rest = (0, head_dim // 2 - cos.shape[1])
    return torch.cat([pad(cos, rest, value=1.0), pad(sin, rest)], dim=1)


def identity_table(table: torch.Tensor) -> torch.Tensor:
    """Return a table of the same size that rotates nothing."""
    cos, sin = table.chunk(2, dim=1)
    return torch.cat([torch.ones_like(cos), torch.zeros_like(sin)], dim=1)


def keep_pairs(table: torch.Tensor, pairs: int) -> torch.Tensor:
    """Return a table that rotates only the first pairs of each head."""
    cos, sin = (half.clone() for half in table.chunk(2, dim=1))
    cos[:, pairs:], sin[:, pairs:] = 1.0, 0.0
    return torch.cat([cos, sin], dim=1)


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> torch.Tensor | None:
    """Return the stored element of each element of a head, int64 [head_dim]; None if the order is unchanged.

    The first `rotary_dim` elements are rotated, half against half, or if `interleaved`, each even one against the next.
    """
    if rotary_dim == head_dim and not interleaved:
        return None
    rotated, unrotated = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    low, high = (rotated[::2], rotated[1::2]) if interleaved else rotated.chunk(2)
    first, second = unrotated.tensor_split(2)
    return torch.cat([low, first, high, second])


def row_order(order: torch.Tensor, heads: int, more: int = 0) -> torch.Tensor:
    """Return the order of rows of a projection to `heads` heads in `order`, followed by `more` unchanged rows."""
    starts = torch.arange(heads)[:, None] * len(order)
    return torch.cat([(starts + order).flatten(), torch.arange(more) + heads * len(order)])


def shifted_order(order: torch.Tensor, unrotated: int) -> torch.Tensor:
    """Return the order of rows with `unrotated` unchanged rows before `order`."""
    return torch.cat([torch.arange(unrotated), order + unrotated])


def gates_last(order: torch.Tensor | None, heads: int, kv_heads: int, head_dim: int) -> torch.Tensor:
    """Return the order of rows of queries, keys, values and gates, where each query head is stored before its gate.

    `order` is that of rows without gates.
    """
    paired = torch.arange(2 * heads * head_dim).view(heads, 2, head_dim)
    others = torch.arange(2 * kv_heads * head_dim) + paired.numel()
    plain = torch.cat([paired[:, 0].flatten(), others])
    return torch.cat([plain if order is None else plain[order], paired[:, 1].flatten()])
