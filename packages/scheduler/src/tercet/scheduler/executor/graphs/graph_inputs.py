"""Input buffers of decode steps at fixed device addresses, because CUDA graphs read them.

A graph has a fixed number of rows, so all rows are written, in one copy. Rows beyond those of the step are *padding*:
decodes of the first token of an unused slot, whose key and value go to the pool's spare page, so they do no harm. Page
tables are large, so they are written only where they have changed, and only for rows in use. Padding rows may read any
page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercet.scheduler.device.staging import Array, HostToDevice

OFFSETS = 4
"""Number of columns that are a position plus an offset: positions, places, sampled places, output positions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeInputViews:
    """Views of the buffers' first rows."""

    positions: torch.Tensor  # int64 [rows]
    places: torch.Tensor  # int64 [rows]: flat index of each input token
    sampled_places: torch.Tensor  # int64 [rows]: flat index for each sampled token
    output_positions: torch.Tensor  # int64 [rows]: output positions of the tokens to be sampled
    kv_lens: torch.Tensor  # int32 [rows]
    slot_mappings: Sequence[torch.Tensor]  # int64 [rows] for each cache group
    page_tables: Sequence[torch.Tensor]  # int32 [rows, pages] for each cache group


class DecodeInputBuffers:
    """Buffers for steps of up to `slots` rows. All readers are launched before the next step is written."""

    def __init__(self, slots: int, width: int, spare_pages: Sequence[int], device: torch.device) -> None:
        """Allocate the buffers. `width` is the maximum of pages per slot; `spare_pages` has one page per cache
        group.
        """
        self.slots = slots
        self._to_device = HostToDevice(device)
        self._shape = OFFSETS + len(spare_pages), slots
        self._memory = torch.zeros(self._shape[0] * slots + -(-slots // 2), dtype=torch.int64, device=device)
        self._columns = self._memory[: self._shape[0] * slots].view(self._shape)
        self._kv_lens = self._memory[self._shape[0] * slots :].view(torch.int32)[:slots]
        self._page_tables = [torch.full((slots, width), page, dtype=torch.int32, device=device) for page in spare_pages]

    def first(self, rows: int) -> DecodeInputViews:
        """Return views of the first `rows` rows."""
        positions, places, sampled_places, output_positions, *slot_mappings = self._columns[:, :rows].unbind()
        return DecodeInputViews(
            positions=positions,
            places=places,
            sampled_places=sampled_places,
            output_positions=output_positions,
            kv_lens=self._kv_lens[:rows],
            slot_mappings=slot_mappings,
            page_tables=[table[:rows] for table in self._page_tables],
        )

    def write(self, positions: Array, offsets: Array, slot_mappings: Sequence[Array]) -> Array:
        """Write decodes of tokens at `positions` (int64 [slots]); `offsets` are int64 [OFFSETS, slots].

        Return the output positions, a view of the staging buffer.
        """
        staged = self._to_device.stage(len(self._memory))
        host: Array = staged.numpy()
        columns: Array = host[: self._columns.numel()].reshape(self._shape)
        np.add(offsets, positions, out=columns[:OFFSETS])
        columns[OFFSETS:] = slot_mappings
        np.add(positions, 1, out=host[self._columns.numel() :].view(np.int32)[: self.slots], casting="same_kind")
        self._memory.copy_(staged, non_blocking=True)
        output_positions: Array = columns[OFFSETS - 1]
        return output_positions

    def change_pages(self, rows: Array, columns: Array, pages: Sequence[Array]) -> None:
        """Change entries of each cache group's page table: int64 [entries], int64 [entries], int32 [entries]."""
        sent_rows, sent_columns, *sent = self._to_device.send([rows, columns, *pages])
        for memory, entries in zip(self._page_tables, sent, strict=True):
            memory.index_put_((sent_rows, sent_columns), entries)

    def write_pages(self, tables: Sequence[Array]) -> None:
        """Write the first pages of the first rows, for each cache group: int32 [rows, pages]."""
        for memory, sent in zip(self._page_tables, self._to_device.send(tables), strict=True):
            rows, pages = sent.shape
            memory[:rows, :pages] = sent
