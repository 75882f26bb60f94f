"""Heads laid out so that every rotary embedding is one of half against half, over the whole head.

Kernels rotate elements i and i + head_dim / 2 of a head. Some models rotate only the first elements of each head, some
rotate neighbours. Their queries and keys are computed in another order, by weights whose rows are put in that order
when they are loaded: what is rotated together comes to lie half a head apart, and what is not rotated meets a cosine of
1 and a sine of 0. Queries and keys change alike, so that no product of them does.
"""

import torch
from torch.nn.functional import pad


def over_whole_heads(table: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A table of `rope_cache` [positions, rotary_dim] for heads in `head_order`: [positions, head_dim]."""
    cos, sin = table.chunk(2, dim=1)
    rest = (0, head_dim // 2 - cos.shape[1])
    return torch.cat([pad(cos, rest, value=1.0), pad(sin, rest)], dim=1)


def standing_still(table: torch.Tensor) -> torch.Tensor:
    """A table of the same size by which nothing is rotated."""
    cos, sin = table.chunk(2, dim=1)
    return torch.cat([torch.ones_like(cos), torch.zeros_like(sin)], dim=1)


def head_order(head_dim: int, rotary_dim: int, *, interleaved: bool = False) -> torch.Tensor | None:
    """Which element of a stored head each element of a head is: int64 [head_dim]; None where it is the same.

    The first `rotary_dim` are rotated, half against half, or `interleaved`, each even one against the next.
    """
    if rotary_dim == head_dim and not interleaved:
        return None
    turned, still = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    low, high = (turned[::2], turned[1::2]) if interleaved else turned.chunk(2)
    first, second = still.tensor_split(2)
    return torch.cat([low, first, high, second])


def row_order(order: torch.Tensor, heads: int, more: int = 0) -> torch.Tensor:
    """The same of the rows of a projection to `heads` heads, and to `more` elements, which stay as they are."""
    starts = torch.arange(heads)[:, None] * len(order)
    return torch.cat([(starts + order).flatten(), torch.arange(more) + heads * len(order)])


def behind(order: torch.Tensor, still: int) -> torch.Tensor:
    """An order of rows that come after `still` others, which stay as they are: of all of them."""
    return torch.cat([torch.arange(still), order + still])
