"""`DecodeInputBuffers`: the integers of a decode step on the device, at fixed addresses, since CUDA graphs read them.

A graph has a fixed number of rows, so every row that there could be is written, in one copy. Those that a step has not
are *padding*: decodes of the first token of a slot that nobody has, whose key and value go to the pool's spare page.
They harm nobody. Page tables, which are large, are written only where they have changed, and only the rows in use:
what padding reads there may be anybody's page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercet.scheduler.device.staging import Array, HostToDevice

OFFSETS = 4
"""Columns that are a decode's position plus something: positions, places, sampled places, output positions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeInputViews:
    """The memory of the first rows."""

    positions: torch.Tensor  # int64 [rows]
    places: torch.Tensor  # int64 [rows]: where the token of each lies
    sampled_places: torch.Tensor  # int64 [rows]: where the token that each samples belongs
    output_positions: torch.Tensor  # int64 [rows], of the tokens to be sampled
    kv_lens: torch.Tensor  # int32 [rows]
    slot_mappings: Sequence[torch.Tensor]  # int64 [rows], of each cache group
    page_tables: Sequence[torch.Tensor]  # int32 [rows, pages], of each cache group


class DecodeInputBuffers:
    """Of steps of up to `slots` rows. All that reads it is started before the next step is written."""

    def __init__(self, slots: int, width: int, spare_pages: Sequence[int], device: torch.device) -> None:
        """`width` pages are the most that a slot holds; `spare_pages` are those of each cache group."""
        self.slots = slots
        self._uploads = HostToDevice(device)
        self._shape = OFFSETS + len(spare_pages), slots
        self._memory = torch.zeros(self._shape[0] * slots + -(-slots // 2), dtype=torch.int64, device=device)
        self._columns = self._memory[: self._shape[0] * slots].view(self._shape)
        self._kv_lens = self._memory[self._shape[0] * slots :].view(torch.int32)[:slots]
        self._page_tables = [torch.full((slots, width), page, dtype=torch.int32, device=device) for page in spare_pages]

    def first(self, rows: int) -> DecodeInputViews:
        """The memory of so many rows."""
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
        """Write decodes of tokens at these positions, int64 [slots]; `offsets` are int64 [OFFSETS, slots].

        Returns their output positions.
        """
        staged = self._uploads.stage(len(self._memory))
        host: Array = staged.numpy()
        columns: Array = host[: self._columns.numel()].reshape(self._shape)
        np.add(offsets, positions, out=columns[:OFFSETS])
        columns[OFFSETS:] = slot_mappings
        np.add(positions, 1, out=host[self._columns.numel() :].view(np.int32)[: self.slots], casting="same_kind")
        self._memory.copy_(staged, non_blocking=True)
        output_positions: Array = columns[OFFSETS - 1]
        return output_positions

    def change_pages(self, rows: Array, columns: Array, pages: Sequence[Array]) -> None:
        """Entries of the page table of each cache group: int64 [entries], int64 [entries], int32 [entries]."""
        sent_rows, sent_columns, *sent = self._uploads.send([rows, columns, *pages])
        for memory, entries in zip(self._page_tables, sent, strict=True):
            memory.index_put_((sent_rows, sent_columns), entries)

    def write_pages(self, tables: Sequence[Array]) -> None:
        """The first pages of the first rows, of each cache group: int32 [rows, pages]."""
        for memory, sent in zip(self._page_tables, self._uploads.send(tables), strict=True):
            rows, pages = sent.shape
            memory[:rows, :pages] = sent
