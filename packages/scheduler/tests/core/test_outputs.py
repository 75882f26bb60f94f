"""Rows that are emitted together are those that would have been emitted one by one."""

import random

import pytest

from tercet.protocol.messages.messages import BatchTokenIDOutput
from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.outputs import FastPathRows, Outputs
from tercet.scheduler.core.request import Req
from tercet.scheduler.testing import request

RowsByPeer = dict[str, set[tuple[str, int, int, int, tuple[int, ...]]]]


def choices(count: int = 40) -> list[Req]:
    """Of two detokenizers, with a token each that is not sent."""
    reqs = []
    for number in range(count):
        req = Req(request(f"f0-{number}", [1, 2, 3], max_new_tokens=9), "f0", number % 3, [number], number)
        req.detokenizer, req.attempt = f"d{number % 2}", number % 4
        req.sent, req.opened = 0, True
        reqs.append(req)
    return reqs


def rows_by_detokenizer(outputs: Outputs) -> RowsByPeer:
    """Of each detokenizer: (rid, index, attempt, position, tokens) of every row."""
    result: RowsByPeer = {}
    for peer, message, *_ in outputs.collect():
        assert isinstance(message, BatchTokenIDOutput)
        offsets, tokens = unpack_ints(message.offsets), unpack_ints(message.token_ids)
        columns = map(unpack_ints, (message.indices, message.attempts, message.positions))
        rows = zip(message.rids, *columns, offsets, offsets[1:], strict=False)
        result[peer] = {(*row, tuple(tokens[first:last])) for *row, first, last in rows}
        assert len(result[peer]) == len(message.rids) == len(offsets) - 1
    return result


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_steady_choices_are_those_of_each(seed: int) -> None:
    """Over steps of which some have the same choices as the one before, and of which some have none."""
    chance = random.Random(seed)
    together, alone, rows = choices(), choices(), FastPathRows()
    steps = [list(range(40)), list(range(40)), [], list(range(40)), *([chance.randrange(40)] for _ in range(3))]
    for step, steady in enumerate([*steps, list(range(30)), list(range(30))]):
        first, second = Outputs(), Outputs()
        if step % 2:
            first.emit(together[39])
            second.emit(alone[39])
        steady = [number for number in steady if number != 39 or not step % 2]
        rows.update([together[number] for number in steady])
        first.emit_fast_path(rows, [together[number].tokens[-1] for number in steady])
        for number in steady:
            second.emit(alone[number])
        assert rows_by_detokenizer(first) == rows_by_detokenizer(second)
        assert [req.sent for req in together] == [req.sent for req in alone]
        for req in (*(together[number] for number in (*steady, 39)), *(alone[number] for number in (*steady, 39))):
            if req.sent == req.output_tokens:
                req.tokens.append(100 * step + req.arrival)


def test_a_choice_that_took_another_route_is_no_steady_one_of_before() -> None:
    reqs, rows = choices(2), FastPathRows()
    rows.update(reqs)
    rows.update(reqs[:1])
    reqs[1].attempt = 9
    rows.update(reqs)
    assert [[*columns.attempts] for columns in rows.columns.values()] == [[0], [9]]


def test_nothing_is_taken_as_nothing() -> None:
    assert Outputs().collect() == []
