"""Writes of new keys and values into the paged cache."""

import torch

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""Largest number of e4m3."""


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:
    """Write k and v [tokens, kv_heads, head_dim] into caches [pages, page_size, kv_heads, head_dim], in place.

    `slot_mapping` int64 [tokens] is page * page_size + offset, without repeats. Keys and values in e4m3 caches are
    divided by their `scales` and clamped to the largest number; other caches are not scaled.
    """
    for new, cache, scale in zip((k, v), (k_cache, v_cache), scales, strict=True):
        if cache.dtype == E4M3:
            bits = to_e4m3(new, scale).view(torch.uint8)
            cache.view(torch.uint8).flatten(0, 1).index_copy_(0, slot_mapping, bits)
        else:
            cache.flatten(0, 1).index_copy_(0, slot_mapping, new.to(cache.dtype))


def to_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Return x / scale rounded to the nearest e4m3 and clamped; NaN stays NaN."""
    return (x.float() * (1 / scale)).clamp(-LARGEST, LARGEST).to(E4M3)
