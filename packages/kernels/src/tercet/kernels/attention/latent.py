"""Latent attention (MLA): attention over one cached vector for each token, shared by all heads.

Multi-head latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1) caches `rank` elements, from
which both keys and values are projected, and `rope` elements of a rotated key that heads share. A model that absorbs
the key projection into its queries and applies the value projection to the result can attend to the cached vectors
directly.

A backend is an `AttentionBackend` over caches with one head, see `latent_caches`. Scores are products with whole
vectors, values are the first `rank` elements, and the result is [tokens, heads, rank].
"""

from dataclasses import dataclass

import torch

from tercet.kernels.attention.api import AttentionParams, LatentQueries


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes and dtypes of latent attention in a model."""

    rank: int
    rope: int
    dtype: torch.dtype  # of queries
    cached: torch.dtype


def latent_caches(vectors: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cached vectors [pages, page_size, rank + rope] as caches of keys and values with one head.

    The values are a view of the keys.
    """
    keys = vectors[:, :, None]
    return keys, keys[..., :rank]


def latent_rank(v_cache: torch.Tensor, params: AttentionParams) -> int:
    """Return the number of a key's elements that are its value.

    Raises ValueError for windows, soft caps and sinks, which no such model has.
    """
    if params.window or params.softcap or params.sinks is not None:
        raise ValueError("attention over latents has no windows, soft caps or sinks")
    return v_cache.shape[3]


def absorbed(queries: LatentQueries) -> torch.Tensor:
    """Return queries of cached vectors, [tokens, heads, rank + rope]: the projection of keys is applied to them."""
    q_nope, q_pe, w_uk, _ = queries
    q = q_nope.new_empty(*q_nope.shape[:2], w_uk.shape[2] + q_pe.shape[2])
    absorb_into(q, q_nope, w_uk)
    q[..., w_uk.shape[2] :] = q_pe
    return q


def absorb_into(q: torch.Tensor, q_nope: torch.Tensor, w_uk: torch.Tensor) -> None:
    """Write the first part of `absorbed` queries into q."""
    torch.bmm(q_nope.transpose(0, 1), w_uk, out=q[..., : w_uk.shape[2]].transpose(0, 1))


def values_of(out: torch.Tensor, w_uv: torch.Tensor) -> torch.Tensor:
    """Project results [tokens, heads, rank] to values [tokens, heads, value_dim]."""
    return torch.bmm(out.transpose(0, 1), w_uv.mT).transpose(0, 1)
