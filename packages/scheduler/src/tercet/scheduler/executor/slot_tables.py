"""`SlotTables`: each slot's tokens and pages, and what a step reads of them.

Which pages a slot has, the host knows before a step runs; its newest token may still be on the device. So all of a
step's integers are worked out on the host and sent in one piece, and token ids alone are gathered where they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.protocol.values import unpack_ints
from tercet.scheduler.core.plan import PageUpdate, Row, SlotInit
from tercet.scheduler.executor.uploads import Uploads

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int32 | np.int64]]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInputs:
    """What the rows of a step compute, on the device but for `output_positions`."""

    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    sample_index: torch.Tensor  # int64 [sampling rows]: the last token of each
    sampled_places: torch.Tensor  # int64 [sampling rows]: where the token that each samples belongs
    output_positions: list[int]  # of those tokens: 0 is the first after the prompt
    attention: list[AttentionBatch]  # of each cache group


class SlotTables:
    """Token ids [slots, length] on the device; on the host page ids [slots, pages] of each cache group."""

    def __init__(self, slots: int, length: int, *, page_size: int, groups: int, device: torch.device) -> None:
        """`length` tokens are the most that a slot holds."""
        self._device = device
        self._uploads = Uploads(device)
        self._length = length
        self._page_size = page_size
        self._tokens = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self._prompts = np.zeros(slots, dtype=np.int64)
        self._pages = [np.zeros((slots, -(-length // page_size)), dtype=np.int32) for _ in range(groups)]

    def introduce(self, init: SlotInit) -> None:
        """Take the tokens that are known of a choice."""
        self._prompts[init.slot] = init.prompt_tokens
        self._write(init.slot, 0, np.array(unpack_ints(init.tokens), dtype=np.int32))

    def append(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Tokens that a slot was given from position `first` on without sampling."""
        self._write(slot, first, np.array(tokens, dtype=np.int32))

    def _write(self, slot: int, first: int, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        if len(tokens):
            self._tokens[slot, first : first + len(tokens)] = self._uploads.send([tokens])[0]

    def read(self, slot: int, first: int, last: int) -> torch.Tensor:
        """Tokens [first, last) of a slot: int64, on the device."""
        return self._tokens[slot, first:last].long()

    def write_sampled(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Give each slot its new token; -1, which must not reach an embedding, is written as 0."""
        self._tokens.view(-1)[places] = tokens.clamp(min=0).int()

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """In their order: of two for the same entry, the later one holds."""
        for update in updates:
            for table, pages in zip(self._pages, update.pages, strict=True):
                table[update.slot, update.first : update.first + len(pages)] = pages

    def gather(self, rows: Sequence[Row], sampling_rows: Sequence[int]) -> StepInputs:
        """What the rows, of which those of `sampling_rows` sample, need of their slots."""
        table = np.array([(row.slot, row.start, row.count) for row in rows], dtype=np.int64)
        slots, starts, counts = table.T
        ends = starts + counts
        query_start = np.zeros(len(rows) + 1, dtype=np.int64)
        counts.cumsum(out=query_start[1:])
        row_of = np.arange(len(rows)).repeat(counts)
        positions = np.arange(query_start[-1]) + (starts - query_start[:-1])[row_of]
        places = slots[row_of] * self._length + positions
        sampling = np.array(sampling_rows, dtype=np.int64)
        written = slots[sampling] * self._length + ends[sampling]
        paged = [self._place(pages, slots, ends, row_of, positions) for pages in self._pages]
        integers = (query_start.astype(np.int32), ends.astype(np.int32), positions, places)
        sent = self._uploads.send(
            [*integers, query_start[1:][sampling] - 1, written, *(part for pair in paged for part in pair)]
        )
        start, kv_lens, position, place, sample_index, sampled_places, *of_groups = sent
        attention = [
            AttentionBatch(
                query_start=start,
                kv_lens=kv_lens,
                page_table=page_table,
                slot_mapping=slot_mapping,
                page_size=self._page_size,
                host_query_lens=counts.tolist(),
                host_kv_lens=ends.tolist(),
            )
            for page_table, slot_mapping in zip(of_groups[::2], of_groups[1::2], strict=True)
        ]
        return StepInputs(
            input_ids=self._tokens.view(-1)[place].long(),
            positions=position,
            sample_index=sample_index,
            sampled_places=sampled_places,
            output_positions=(ends - self._prompts[slots])[sampling].tolist(),
            attention=attention,
        )

    def _place(
        self, pages: Integers, slots: Integers, ends: Integers, row_of: Integers, positions: Integers
    ) -> tuple[Integers, Integers]:
        """(the rows' page table, where each new token belongs) of a cache group."""
        width = -(-int(ends.max()) // self._page_size)
        page_table = pages[:, :width].take(slots, axis=0)
        page, offset = np.divmod(positions, self._page_size)
        return page_table, page_table[row_of, page].astype(np.int64) * self._page_size + offset
