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

_NOBODY = -1
"""Instead of a prompt's length: nobody was introduced."""


@dataclass(frozen=True, eq=False, kw_only=True)
class StepInputs:
    """What the rows of a step compute, on the device but for its arrays."""

    input_ids: torch.Tensor  # int64 [tokens]
    positions: torch.Tensor  # int64 [tokens]
    sample_index: torch.Tensor  # int64 [sampling rows]: the last token of each
    sampled_places: torch.Tensor  # int64 [sampling rows]: where the token that each samples belongs
    sent_positions: torch.Tensor  # int64 [sampling rows]: `output_positions`
    attention: list[AttentionBatch]  # of each cache group
    slots: Integers  # [rows]
    sampling_rows: Integers  # [sampling rows]: which rows these are
    output_positions: Integers  # [sampling rows], of the tokens to be sampled: 0 is the first after the prompt


@dataclass(frozen=True, eq=False, kw_only=True)
class _Layout:
    """How the tokens of a step lie one after another: the same in every step whose rows have these slots and counts."""

    given: tuple[list[int], list[int], list[bool]]  # slots, counts, and which rows sample
    slots: Integers  # [rows]
    counts: Integers  # [rows]
    row_of: Integers  # [tokens]
    within: Integers  # [tokens]: how far behind the first of its row
    sampling: Integers  # [sampling rows]
    last: Integers  # [sampling rows]: the last token of each
    query_start: torch.Tensor  # int32 [rows + 1]
    sample_index: torch.Tensor  # int64: `last`


class SlotTables:
    """Token ids [slots, length] on the device; on the host page ids [slots, pages] of each cache group."""

    def __init__(self, slots: int, length: int, *, page_size: int, groups: int, device: torch.device) -> None:
        """`length` tokens are the most that a slot holds."""
        self._device = device
        self._uploads = Uploads(device)
        self._length = length
        self._page_size = page_size
        self._tokens = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self._flat = self._tokens.view(-1)
        self._zero = torch.zeros(1, dtype=torch.int64, device=device)  # what is compared with it is widened, too
        self._prompts = np.full(slots, _NOBODY, dtype=np.int64)
        self._layout: _Layout | None = None
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
        """Give each slot its new token, or -1, which is read as 0: it must not reach an embedding."""
        self._flat.index_copy_(0, places, tokens.int())

    def update_pages(self, updates: Sequence[PageUpdate]) -> None:
        """In their order: of two for the same entry, the later one holds."""
        for update in updates:
            for table, pages in zip(self._pages, update.pages, strict=True):
                table[update.slot, update.first : update.first + len(pages)] = pages

    def gather(self, rows: Sequence[Row]) -> StepInputs:
        """What the rows of a step need of their slots. Raises ValueError for a slot that nobody has."""
        layout = self._laid_out(rows)
        slots, row_of, sampling = layout.slots, layout.row_of, layout.sampling
        prompts = self._prompts[slots]
        if len(prompts) and prompts.min() == _NOBODY:
            raise ValueError(f"slot {slots[prompts.argmin()]} was never introduced")
        starts = np.array([row.start for row in rows], dtype=np.int64)
        ends = starts + layout.counts
        positions = starts[row_of] + layout.within
        places = slots[row_of] * self._length + positions
        paged = [self._place(pages, slots, ends, row_of, positions) for pages in self._pages]
        output_positions = (ends - prompts)[sampling]
        integers = ends.astype(np.int32), positions, places, places[layout.last] + 1, output_positions
        sent = self._uploads.send([*integers, *(part for pair in paged for part in pair)])
        kv_lens, position, place, sampled_places, sent_positions, *of_groups = sent
        attention = [
            AttentionBatch(
                query_start=layout.query_start,
                kv_lens=kv_lens,
                page_table=page_table,
                slot_mapping=slot_mapping,
                page_size=self._page_size,
                host_query_lens=layout.given[1],
                host_kv_lens=ends.tolist(),
            )
            for page_table, slot_mapping in zip(of_groups[::2], of_groups[1::2], strict=True)
        ]
        return StepInputs(
            input_ids=torch.maximum(self._flat.index_select(0, place), self._zero),
            positions=position,
            sample_index=layout.sample_index,
            sampled_places=sampled_places,
            attention=attention,
            slots=slots,
            sampling_rows=sampling,
            output_positions=output_positions,
            sent_positions=sent_positions,
        )

    def _laid_out(self, rows: Sequence[Row]) -> _Layout:
        """The last step's layout, if this one's is the same: of decodes it mostly is."""
        given = [row.slot for row in rows], [row.count for row in rows], [row.sample for row in rows]
        if self._layout is None or self._layout.given != given:
            slots, counts = (np.array(column, dtype=np.int64) for column in given[:2])
            query_start = np.zeros(len(rows) + 1, dtype=np.int64)
            counts.cumsum(out=query_start[1:])
            row_of = np.arange(len(rows)).repeat(counts)
            sampling = np.flatnonzero(given[2])
            last = query_start[1:][sampling] - 1
            sent_start, sample_index = self._uploads.send([query_start.astype(np.int32), last])
            self._layout = _Layout(
                given=given,
                slots=slots,
                counts=counts,
                row_of=row_of,
                within=np.arange(query_start[-1]) - query_start[row_of],
                sampling=sampling,
                last=last,
                query_start=sent_start,
                sample_index=sample_index,
            )
        return self._layout

    def _place(
        self, pages: Integers, slots: Integers, ends: Integers, row_of: Integers, positions: Integers
    ) -> tuple[Integers, Integers]:
        """(the rows' page table, where each new token belongs) of a cache group."""
        width = -(-int(ends.max()) // self._page_size)
        page_table = pages[:, :width].take(slots, axis=0)
        page, offset = np.divmod(positions, self._page_size)
        return page_table, page_table[row_of, page].astype(np.int64) * self._page_size + offset
