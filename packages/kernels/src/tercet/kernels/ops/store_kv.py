"""Writing new keys and values into the paged cache."""

import torch


def store_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write k and v [tokens, kv_heads, head_dim] into caches [pages, page_size, kv_heads, head_dim], in place.

    `slot_mapping` int64 [tokens] is page * page_size + offset, without repeats.
    """
    k_cache.flatten(0, 1).index_copy_(0, slot_mapping, k.to(k_cache.dtype))
    v_cache.flatten(0, 1).index_copy_(0, slot_mapping, v.to(v_cache.dtype))
