"""Page tables as wide as a served model's: most of the splits that there are for them are empty."""

from dataclasses import replace

import torch

from tercet.kernels.attention.api import AttentionBatch


def with_wide_table(batch: AttentionBatch, width: int) -> AttentionBatch:
    """The same rows in a page table of so many columns. What is behind a row's own pages is never read."""
    table = torch.full((batch.rows, width), 1 << 30, dtype=torch.int32, device=batch.page_table.device)
    table[:, : batch.page_table.shape[1]] = batch.page_table
    return replace(batch, page_table=table)
