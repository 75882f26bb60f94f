"""What a step reads of its slots, against a reading token by token."""

import random

import pytest
import torch

from tercet.protocol.messages.values import SamplingParams, pack_ints
from tercet.scheduler.core.plan import PageUpdate, Row, SlotInit
from tercet.scheduler.executor.slot_tables import SlotTables

SLOTS, LENGTH, PAGE = 5, 40, 4
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


def init(slot: int, tokens: list[int], prompt: int) -> SlotInit:
    sampling = SamplingParams(max_new_tokens=9)
    return SlotInit(slot=slot, tokens=pack_ints(tokens), prompt_tokens=prompt, choice=0, sampling=sampling)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spare", [[], [100, 200]])
@pytest.mark.parametrize("seed", range(8))
def test_a_step_reads_every_token_and_page_that_its_rows_name(device: str, spare: list[int], seed: int) -> None:
    chance = random.Random(seed)
    tables = SlotTables(SLOTS, LENGTH, page_size=PAGE, groups=2, device=torch.device(device), spare_pages=spare)
    tokens = {slot: [chance.randrange(1000) for _ in range(chance.randint(1, LENGTH - 1))] for slot in range(SLOTS)}
    pages = {slot: [chance.sample(range(99), LENGTH // PAGE) for _ in range(2)] for slot in range(SLOTS)}
    prompts = {slot: chance.randint(1, len(known)) for slot, known in tokens.items()}
    for slot in range(SLOTS):
        tables.introduce(init(slot, tokens[slot], prompts[slot]), -slot)
    tables.update_pages([PageUpdate(slot, 2, [[7, 7, 7], [8, 8, 8]]) for slot in range(SLOTS)])
    tables.update_pages([PageUpdate(slot, 0, pages[slot]) for slot in range(SLOTS)])  # the later one holds
    rows = []
    for slot in chance.sample(range(SLOTS), chance.randint(1, SLOTS)):
        end = len(tokens[slot])
        start = end - 1 if seed % 2 else chance.choice([end - 1, chance.randrange(end)])  # decodes alone, or mixed
        rows.append(Row(slot, start, end - start, sample=chance.random() < 0.7))
    rows.sort(key=lambda row: row.count > 1)
    sampling = [index for index, row in enumerate(rows) if row.sample]

    inputs = tables.gather(rows)

    each = [(row.slot, position) for row in rows for position in range(row.start, row.start + row.count)]
    assert tables.ids_at(inputs.places).tolist() == [tokens[slot][position] for slot, position in each]
    assert inputs.positions.tolist() == [position - slot for slot, position in each]
    last = [sum(row.count for row in rows[: index + 1]) - 1 for index in sampling]
    assert inputs.sample_index.tolist() == last
    assert inputs.sampling_rows == sampling
    assert inputs.sent_positions.tolist() == inputs.output_positions.tolist()
    assert inputs.output_positions.tolist() == [len(tokens[rows[i].slot]) - prompts[rows[i].slot] for i in sampling]
    for group, batch in enumerate(inputs.attention):
        assert batch.query_start.tolist() == [sum(row.count for row in rows[:i]) for i in range(len(rows) + 1)]
        assert batch.kv_lens.tolist() == batch.host_kv_lens == [row.start + row.count for row in rows]
        assert batch.host_query_lens == [row.count for row in rows]
        places = [pages[slot][group][position // PAGE] * PAGE + position % PAGE for slot, position in each]
        assert batch.slot_mapping.tolist() == places
        for row, page_table in zip(rows, batch.page_table.tolist(), strict=True):
            used = -(-(row.start + row.count) // PAGE)
            assert page_table[:used] == pages[row.slot][group][:used]
        assert (batch.query_start.dtype, batch.slot_mapping.dtype) == (torch.int32, torch.int64)
        assert inputs.in_fixed_buffers or batch.page_table.is_contiguous()
    assert inputs.in_fixed_buffers == (bool(spare) and all(row.count == 1 for row in rows))


@pytest.mark.parametrize("device", DEVICES)
def test_sampled_and_given_tokens_are_read_by_the_next_step(device: str) -> None:
    tables = SlotTables(SLOTS, LENGTH, page_size=PAGE, groups=1, device=torch.device(device))
    for slot in range(3):
        tables.introduce(init(slot, [10 * slot, 10 * slot + 1], 2))
    inputs = tables.gather([Row(slot, 0, 2, sample=slot != 1) for slot in range(3)])
    tables.write_sampled(inputs.sampled_places, torch.tensor([77, -1], device=device))
    tables.append(0, 3, [78, 79])
    assert tables.read(0, 0, 5).tolist() == [0, 1, 77, 78, 79]
    assert tables.ids_at(tables.gather([Row(2, 2, 1, sample=True)]).places).tolist() == [0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spare", [[], [100]])
def test_decodes_of_the_same_slots_see_what_has_changed(device: str, spare: list[int]) -> None:
    """Pages that were given long before they are needed, others in their place, and another choice in the slot."""
    tables = SlotTables(SLOTS, LENGTH, page_size=PAGE, groups=1, device=torch.device(device), spare_pages=spare)
    for slot in range(2):
        tables.introduce(init(slot, [slot + 1] * 3, 3))
        tables.update_pages([PageUpdate(slot, 0, [[10 * slot + page for page in range(4)]])])

    def decode(place: int) -> tuple[list[list[int]], list[int]]:
        """(pages, output positions) of both slots."""
        inputs = tables.gather([Row(slot, place, 1, sample=True) for slot in range(2)])
        width = place // PAGE + 1
        return inputs.attention[0].page_table[:, :width].tolist(), inputs.output_positions.tolist()

    assert decode(2) == ([[0], [10]], [0, 0])
    assert decode(3) == ([[0], [10]], [1, 1])
    assert decode(4) == ([[0, 1], [10, 11]], [2, 2])
    tables.update_pages([PageUpdate(1, 0, [[7]])])
    assert decode(5) == ([[0, 1], [7, 11]], [3, 3])
    tables.introduce(init(0, [5] * 6, 1))
    assert decode(6) == ([[0, 1], [7, 11]], [6, 4])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(6))
def test_page_tables_in_place_are_those_of_the_host_whatever_changes(device: str, seed: int) -> None:
    """Rows grow by a page, pages are taken over by others, slots have several rows, and now and then others decode."""
    chance = random.Random(seed)
    length = 400
    tables = SlotTables(SLOTS, length, page_size=PAGE, groups=2, device=torch.device(device), spare_pages=[998, 999])
    pages: list[tuple[list[int], list[int]]] = [([], []) for _ in range(SLOTS)]
    for slot in range(SLOTS):
        tables.introduce(init(slot, [1] * 9, 9))
    place, slots = 8, [0, 1, 2]
    for _ in range(120):
        for slot in range(SLOTS):
            while len(pages[slot][0]) <= place // PAGE + 1:
                fresh = [[chance.randrange(900)] for _ in range(2)]
                tables.update_pages([PageUpdate(slot, len(pages[slot][0]), fresh)])
                for group, given in zip(pages[slot], fresh, strict=True):
                    group += given
        if chance.random() < 0.3:
            slot, first = chance.randrange(SLOTS), chance.randrange(place // PAGE)
            for _ in range(2):  # of two for the same entries the later one holds
                other = [[chance.randrange(900) for _ in range(2)] for _ in range(2)]
                tables.update_pages([PageUpdate(slot, first, other)])
                for group, given in zip(pages[slot], other, strict=True):
                    group[first : first + 2] = given
        if chance.random() < 0.2:
            slots = chance.choice([[0, 1, 2], [3, 1, 1, 1], [4], [2, 0, 3, 4, 1]])
        behind = [slots[:row].count(slot) for row, slot in enumerate(slots)]
        rows = [Row(slot, place + more, 1, sample=True) for slot, more in zip(slots, behind, strict=True)]
        inputs = tables.gather(rows)
        assert inputs.in_fixed_buffers
        for number, batch in enumerate(inputs.attention):
            for row, table in zip(rows, batch.page_table.tolist(), strict=True):
                used = row.start // PAGE + 1
                assert table[:used] == pages[row.slot][number][:used]
        place += chance.randrange(3) if place < length - 20 else 0
