"""Tokens and pages of each slot, and the inputs that a step gathers from them.

The host knows a slot's pages before a step runs, but its newest token may exist on the device only. So the host
computes all integers of a step and sends them in one piece; only token ids are gathered on the device. The layout of
consecutive steps with the same rows, as decodes mostly are, is computed once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tercet.kernels.attention.api import AttentionBatch
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.plan import PageUpdate, Row, SlotInit
from tercet.scheduler.device.staging import HostToDevice
from tercet.scheduler.executor.graphs.graph_inputs import OFFSETS, DecodeInputBuffers, DecodeInputViews

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int32 | np.int64]]

_SPARE_COLUMNS = 32
"""Columns of page tables that are written in advance, so that later steps send changes only."""
_EMPTY_SLOT = -1
"""Prompt length of a slot that is not in use."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInputs:
    """The inputs of a step's rows, on the device except for arrays and lists."""

    places: torch.Tensor  # int64 [tokens]: flat token indices, see `SlotTables.ids_at`
    positions: torch.Tensor  # int64 [tokens]: rows of rotary tables
    sample_index: torch.Tensor  # int64 [sampling rows]: the last token of each
    sampled_places: torch.Tensor  # int64 [sampling rows]: flat index for each sampled token
    sent_positions: torch.Tensor  # int64 [sampling rows]: `output_positions` on the device
    attention: list[AttentionBatch]  # one per cache group
    slots: Integers  # [rows]
    sampling_rows: list[int]  # indices of the rows that sample
    # [sampling rows]: output position of each token to be sampled; 0 is the first after the prompt
    output_positions: Integers
    in_fixed_buffers: bool
    """The inputs lie in `DecodeInputBuffers`: each row has one token."""
    chained: bool
    """A slot has several rows, each of which sees the tokens that earlier ones store."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _Decodes:
    """The layout of decodes of the same slots in `DecodeInputBuffers`, with padding behind them."""

    slots: Integers  # [all rows]
    offsets: Integers  # [OFFSETS, all rows]: added to a row's position
    views: DecodeInputViews


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layout:
    """The layout of a step's tokens, the same for every step whose rows have these slots and counts."""

    given: tuple[list[int], list[int], list[bool]]  # slots, counts, and whether each row samples
    slots: Integers  # [rows]
    counts: Integers  # [rows]
    prompts: Integers  # [rows]: prompt lengths
    row_of: Integers  # [tokens]
    within: Integers  # [tokens]: offset from the first token of the row
    shifts: Integers  # [tokens]: see `SlotTables.introduce`
    sampling: Integers  # [sampling rows]
    sampling_rows: list[int]  # `sampling` as a list
    last: Integers  # [sampling rows]: index of the last token of each
    query_start: torch.Tensor  # int32 [rows + 1]
    sample_index: torch.Tensor  # int64: `last` on the device
    chained: bool
    decodes: _Decodes | None


class SlotTables:
    """Token ids [slots, length] on the device; page ids [slots, pages] of each cache group on the host.

    An extra slot stands for padding.
    """

    def __init__(
        self,
        slots: int,
        length: int,
        *,
        page_size: int,
        groups: int,
        device: torch.device,
        spare_pages: Sequence[int] = (),
    ) -> None:
        """Create empty tables; `length` is the maximum of tokens per slot. With `spare_pages`, decodes use
        `DecodeInputBuffers`.
        """
        self._to_device = HostToDevice(device)
        self._slots = slots
        self._length = length
        self._page_size = page_size
        self._tokens = torch.zeros(slots + 1, length, dtype=torch.int32, device=device)
        self._flat = self._tokens.view(-1)
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)  # int64: `maximum` widens token ids to it
        self._prompts = np.full(slots + 1, _EMPTY_SLOT, dtype=np.int64)
        self._shifts = np.zeros(slots + 1, dtype=np.int64)
        self._layout: _Layout | None = None
        width = -(-length // page_size)
        self._pages = [np.zeros((slots + 1, width), dtype=np.int32) for _ in range(groups)]
        self.memory = DecodeInputBuffers(slots, width, spare_pages, device) if spare_pages else None
        self._written = 0  # columns of the rows' page tables that `memory` has
        self._changed: list[PageUpdate] = []  # updates since `memory` was written
        for table, page in zip(self._pages, spare_pages, strict=False):
            table[slots] = page

    def introduce(self, init: SlotInit, shift: int = 0) -> None:
        """Store the known tokens of a choice in its slot. `shift` is from the index of a token to its position."""
        self._prompts[init.slot] = init.prompt_tokens
        self._shifts[init.slot] = shift
        self._layout = None
        self._write(init.slot, 0, np.array(unpack_ints(init.tokens), dtype=np.int32))

    def append(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """Write tokens from position `first` on that were not sampled."""
        self._write(slot, first, np.array(tokens, dtype=np.int32))

    def _write(self, slot: int, first: int, tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
        if len(tokens):
            self._tokens[slot, first : first + len(tokens)] = self._to_device.send([tokens])[0]

    def read(self, slot: int, first: int, last: int) -> torch.Tensor:
        """Return tokens [first, last) of a slot: int64, on the device."""
        return self._tokens[slot, first:last].long()

    def ids_at(self, places: torch.Tensor) -> torch.Tensor:
        """Return the tokens at flat indices (`StepInputs.places`): int64, on the device."""
        return torch.maximum(self._flat.index_select(0, places), self._zero)

    def write_sampled(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write each slot's new token. A -1 is read as 0, because it must not reach an embedding."""
        self._flat.index_copy_(0, places, tokens.int())

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """Apply updates in their order: a later one of the same entry wins."""
        if self.memory is not None:
            self._changed += updates
        for update in updates:
            for table, pages in zip(self._pages, update.pages, strict=False):
                table[update.slot, update.first : update.first + len(pages)] = pages

    def assume(self, rows: Sequence[Row], assumed: Mapping[int, int]) -> None:
        """Write draft tokens at the start of some rows; the rows before them may sample other tokens."""
        places = [rows[index].slot * self._length + rows[index].start for index in assumed]
        given = np.array(places, dtype=np.int64), np.array([*assumed.values()], dtype=np.int64)
        self.write_sampled(*self._to_device.send(given))

    def gather(self, rows: Sequence[Row]) -> StepInputs:
        """Return the inputs of a step's rows. Raise ValueError for a slot that is not in use."""
        layout = self._laid_out(rows)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        if self.memory is not None and layout.decodes is not None:
            return self._gather_decodes(self.memory, layout, layout.decodes, starts)
        slots, row_of, sampling = layout.slots, layout.row_of, layout.sampling
        ends = starts + layout.counts
        positions = starts[row_of] + layout.within
        places = slots[row_of] * self._length + positions
        paged = [self._place(pages, slots, ends, row_of, positions) for pages in self._pages]
        output_positions = (ends - layout.prompts)[sampling]
        rotary = positions + layout.shifts
        integers = ends.astype(np.int32), rotary, places, places[layout.last] + 1, output_positions
        sent = self._to_device.send([*integers, *(part for pair in paged for part in pair)])
        kv_lens, position, place, sampled_places, sent_positions, *of_groups = sent
        host_kv_lens = ends.tolist()
        attention = [
            self._attention(layout, kv_lens, page_table, slot_mapping, host_kv_lens)
            for page_table, slot_mapping in zip(of_groups[::2], of_groups[1::2], strict=True)
        ]
        return StepInputs(
            places=place,
            positions=position,
            sample_index=layout.sample_index,
            sampled_places=sampled_places,
            attention=attention,
            slots=slots,
            sampling_rows=layout.sampling_rows,
            output_positions=output_positions,
            sent_positions=sent_positions,
            in_fixed_buffers=False,
            chained=layout.chained,
        )

    def clear_decodes(self) -> None:
        """Fill `memory` with padding: the rows of the last step name pages that may belong to other slots by now."""
        if self.memory is not None:
            nobody = np.zeros(0, dtype=np.int64)
            self._write_decodes(self.memory, self._decodes(self.memory, nobody, nobody), nobody)

    def _gather_decodes(
        self, memory: DecodeInputBuffers, layout: _Layout, decodes: _Decodes, starts: Integers
    ) -> StepInputs:
        views = decodes.views
        output_positions = self._write_decodes(memory, decodes, starts)[: len(starts)]
        ends = starts + 1
        self._write_pages(memory, layout.slots, -(-int(ends.max()) // self._page_size))
        host_kv_lens = ends.tolist()
        sampled_places, sent_positions = views.sampled_places, views.output_positions
        if len(layout.sampling) < len(starts):
            sampled_places, sent_positions = sampled_places[layout.sample_index], sent_positions[layout.sample_index]
            output_positions = output_positions[layout.sampling]
        return StepInputs(
            places=views.places,
            positions=views.positions,
            sample_index=layout.sample_index,
            sampled_places=sampled_places,
            attention=[
                self._attention(layout, views.kv_lens, page_table, slot_mapping, host_kv_lens)
                for page_table, slot_mapping in zip(views.page_tables, views.slot_mappings, strict=True)
            ],
            slots=layout.slots,
            sampling_rows=layout.sampling_rows,
            output_positions=output_positions,
            sent_positions=sent_positions,
            in_fixed_buffers=True,
            chained=layout.chained,
        )

    def _write_pages(self, memory: DecodeInputBuffers, slots: Integers, width: int) -> None:
        """Update the slots' page tables up to a column: all of them, or only changed entries."""
        if self._written < width:
            self._written = min(width + _SPARE_COLUMNS, self._pages[0].shape[1])
            memory.write_pages([pages[:, : self._written].take(slots, axis=0) for pages in self._pages])
        elif changed := self._changed:
            rows_of: dict[int, list[int]] = {}
            for row, slot in enumerate(slots.tolist()):
                rows_of.setdefault(slot, []).append(row)
            places = [
                (row, column)
                for update in changed
                for row in rows_of.get(update.slot, [])
                for column in range(update.first, min(update.first + max(map(len, update.pages)), self._written))
            ]
            if places:
                rows, columns = np.array(places, dtype=np.int64).T
                memory.change_pages(rows, columns, [pages[slots[rows], columns] for pages in self._pages])
        self._changed = []

    def _decodes(self, memory: DecodeInputBuffers, slots: Integers, prompts: Integers) -> _Decodes:
        """Return the layout of decodes of slots with the given prompt lengths."""
        rows = np.full(self._slots, self._slots)
        rows[: len(slots)] = slots
        offsets = np.zeros((OFFSETS, self._slots), dtype=np.int64)
        offsets[:3] = self._shifts[rows], rows * self._length, rows * self._length + 1
        offsets[3, : len(slots)] = 1 - prompts
        return _Decodes(slots=rows, offsets=offsets, views=memory.first(len(slots)))

    def _write_decodes(self, memory: DecodeInputBuffers, decodes: _Decodes, starts: Integers) -> Integers:
        """Write rows that begin at `starts`, and padding. Return the output positions of all."""
        positions = np.zeros(self._slots, dtype=np.int64)
        positions[: len(starts)] = starts
        page, offset = np.divmod(positions, self._page_size)
        mappings = [
            np.multiply(pages[decodes.slots, page], self._page_size, dtype=np.int64) + offset for pages in self._pages
        ]
        return memory.write(positions, decodes.offsets, mappings)

    def _attention(
        self,
        layout: _Layout,
        kv_lens: torch.Tensor,
        page_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        host_kv_lens: list[int],
    ) -> AttentionBatch:
        """Return the attention batch of one cache group."""
        return AttentionBatch(
            query_start=layout.query_start,
            kv_lens=kv_lens,
            page_table=page_table,
            slot_mapping=slot_mapping,
            page_size=self._page_size,
            host_query_lens=layout.given[1],
            host_kv_lens=host_kv_lens,
        )

    def _laid_out(self, rows: Sequence[Row]) -> _Layout:
        """Return the last step's layout if it fits, which is the usual case for decodes; else a new one."""
        given = [row.slot for row in rows], [row.count for row in rows], [row.sample for row in rows]
        if self._layout is None or self._layout.given != given:
            slots, counts = (np.array(column, dtype=np.int64) for column in given[:2])
            prompts = self._prompts[slots]
            if len(prompts) and prompts.min() == _EMPTY_SLOT:
                raise ValueError(f"slot {slots[prompts.argmin()]} was never introduced")
            query_start = np.zeros(len(rows) + 1, dtype=np.int64)
            counts.cumsum(out=query_start[1:])
            row_of = np.arange(len(rows)).repeat(counts)
            sampling = np.flatnonzero(given[2])
            last = query_start[1:][sampling] - 1
            sent_start, sample_index = self._to_device.send([query_start.astype(np.int32), last])
            decodes = None
            if self.memory is not None and given[1].count(1) == len(rows) <= self._slots:
                decodes = self._decodes(self.memory, slots, prompts)
                self._written = 0
            self._layout = _Layout(
                given=given,
                slots=slots,
                counts=counts,
                prompts=prompts,
                row_of=row_of,
                within=np.arange(query_start[-1]) - query_start[row_of],
                shifts=self._shifts[slots][row_of],
                sampling=sampling,
                sampling_rows=sampling.tolist(),
                last=last,
                query_start=sent_start,
                sample_index=sample_index,
                chained=len(set(given[0])) < len(rows),
                decodes=decodes,
            )
        return self._layout

    def _place(
        self, pages: Integers, slots: Integers, ends: Integers, row_of: Integers, positions: Integers
    ) -> tuple[Integers, Integers]:
        """Return the rows' page table and the cache slot of each new token, for one cache group."""
        width = -(-int(ends.max()) // self._page_size)
        page_table = pages[:, :width].take(slots, axis=0)
        page, offset = np.divmod(positions, self._page_size)
        return page_table, page_table[row_of, page].astype(np.int64) * self._page_size + offset
