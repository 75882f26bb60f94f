"""Pages outside of all windows, which other texts may hold by then."""

import torch

from tercet.kernels.attention.api import AttentionBatch


def poison_freed_pages(batch: AttentionBatch, window: int, *caches: torch.Tensor) -> None:
    """Fill the pages before the window of each row's first new token with NaN."""
    for row, (new, kv_len) in enumerate(zip(batch.host_query_lens, batch.host_kv_lens, strict=True)):
        freed = max(0, kv_len - new - window + 1) // batch.page_size if window else 0
        for cache in caches:
            cache[batch.page_table[row, :freed].long()] = torch.nan
