"""`DecodeMemory`: where the integers of a decode lie on the device, in the same place at every step: graphs read them.

A graph has a fixed number of rows, so every row that there could be is written, in one copy. Those that a step has not
are *padding*: decodes of the first token of a slot that nobody has, whose key and value go to the pool's spare page.
They harm nobody. Page tables, which are large, are written only where they have changed, and only the rows in use:
what padding reads there may be anybody's page.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercet.scheduler.executor.uploads import Array, Uploads, starts, unpack

OFFSETS = 4
"""Columns that are a decode's position plus something: positions, places, sampled places, output positions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class DecodeViews:
    """The memory of the first rows."""

    positions: torch.Tensor  # int64 [rows]
    places: torch.Tensor  # int64 [rows]: where the token of each lies
    sampled_places: torch.Tensor  # int64 [rows]: where the token that each samples belongs
    output_positions: torch.Tensor  # int64 [rows], of the tokens to be sampled
    kv_lens: torch.Tensor  # int32 [rows]
    slot_mappings: Sequence[torch.Tensor]  # int64 [rows], of each cache group
    page_tables: Sequence[torch.Tensor]  # int32 [rows, pages], of each cache group


class DecodeMemory:
    """Of steps of up to `slots` rows. All that reads it is started before the next step is written."""

    def __init__(self, slots: int, width: int, spare_pages: Sequence[int], device: torch.device) -> None:
        """`width` pages are the most that a slot holds; `spare_pages` are those of each cache group."""
        self.slots = slots
        self._uploads = Uploads(device)
        groups = len(spare_pages)
        template: list[Array] = [
            np.zeros((OFFSETS + groups, slots), dtype=np.int64),
            np.zeros(slots, dtype=np.int32),
        ]
        self._memory = torch.zeros(starts(template)[-1], dtype=torch.uint8, device=device)
        self._columns, self._kv_lens = unpack(self._memory, template)
        self._page_tables = [torch.full((slots, width), page, dtype=torch.int32, device=device) for page in spare_pages]

    def first(self, rows: int) -> DecodeViews:
        """The memory of so many rows."""
        positions, places, sampled_places, output_positions, *slot_mappings = self._columns[:, :rows].unbind()
        return DecodeViews(
            positions=positions,
            places=places,
            sampled_places=sampled_places,
            output_positions=output_positions,
            kv_lens=self._kv_lens[:rows],
            slot_mappings=slot_mappings,
            page_tables=[table[:rows] for table in self._page_tables],
        )

    def write(self, columns: Array, kv_lens: Array) -> None:
        """int64 [OFFSETS + groups, slots], of which the last are the slot mappings; int32 [slots]."""
        self._uploads.write(self._memory, [columns, kv_lens])

    def write_pages(self, tables: Sequence[Array]) -> None:
        """The first pages of the first rows, of each cache group: int32 [rows, pages]."""
        for memory, sent in zip(self._page_tables, self._uploads.send(tables), strict=True):
            rows, pages = sent.shape
            memory[:rows, :pages] = sent
