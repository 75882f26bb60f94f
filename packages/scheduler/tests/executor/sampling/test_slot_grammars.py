"""Rows whose masks are late sample nothing and sit out; those of others have their masks in time."""

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Self

import numpy as np
import pytest

from tercet.protocol.messages.values import Grammar, GrammarKind, SamplingParams, pack_ints
from tercet.scheduler.core.plan import SlotInit
from tercet.scheduler.executor.sampling.slot_grammars import SPENT, ConstrainedRows, SlotGrammars
from tercet.scheduler.grammar.port import Masks

LONG = 60.0
Made = Callable[..., "tuple[SlotGrammars, Backend]"]
QUICK, SLOW = Grammar(GrammarKind.REGEX, "quick"), Grammar(GrammarKind.REGEX, "slow")


class Counting:
    """A matcher that allows the token which is the number of those before, and the one behind."""

    def __init__(self, grammar: Grammar, seen: Sequence[int] = ()) -> None:
        self.grammar = grammar
        self.seen = list(seen)
        self.error = ""
        self.accepting = self.finished = False

    def advance(self, tokens: Sequence[int]) -> None:
        self.seen += tokens

    def forced(self) -> list[int]:
        return []

    def copy(self) -> Self:
        return type(self)(self.grammar, self.seen)


class Backend:
    """A backend whose masks of SLOW use processor time once they may start, and then wait until they are let go."""

    name = "counting"
    end_ids = (7,)

    def __init__(self, busy: float = 0.004) -> None:
        self.start = Event()
        self.start.set()
        self.go = Event()
        self.begun = Event()
        self.busy = busy
        self.filled: list[list[int]] = []

    def compile(self, grammar: Grammar) -> Counting:
        return Counting(grammar)

    def fill(self, matchers: Sequence[Counting], masks: Masks) -> None:
        for row, matcher in enumerate(matchers):
            if matcher.grammar == SLOW:
                self.filled.append(list(matcher.seen))
                assert self.start.wait(LONG)
                end = time.thread_time() + self.busy
                while time.thread_time() < end:
                    pass
                self.begun.set()
                assert self.go.wait(LONG)
            masks[row] = 3 << len(matcher.seen)


@pytest.fixture
def made() -> Iterator[Made]:
    closing: list[tuple[SlotGrammars, Backend]] = []

    def make(busy: float = 0.004, **options: float) -> tuple[SlotGrammars, Backend]:
        backend = Backend(busy)
        grammars = SlotGrammars(backend, 4, 8, **options)  # type: ignore[arg-type]
        closing.append((grammars, backend))
        return grammars, backend

    yield make
    for grammars, backend in closing:
        backend.start.set()
        backend.go.set()
        grammars.close()


def init(slot: int, grammar: Grammar, request: int, output: Sequence[int] = ()) -> SlotInit:
    return SlotInit(
        slot=slot,
        tokens=pack_ints([1, *output]),
        prompt_tokens=1,
        choice=0,
        sampling=SamplingParams(max_new_tokens=20, grammar=grammar),
        request=request,
    )


def begun(
    grammars: SlotGrammars, step: int, slots: Sequence[int], assumed: Sequence[int | None] = ()
) -> ConstrainedRows:
    rows = grammars.begin(step, np.array(slots), assumed)
    assert rows is not None
    return rows


def wait_for(grammars: SlotGrammars, *slots: int) -> None:
    """Wait until the masks of slots are there: this machine may be busy."""
    for slot in slots:
        constraint = grammars._constraints[slot]
        assert constraint is not None
        assert constraint.job is not None
        assert constraint.job.done.wait(LONG)


def test_a_late_mask_leaves_the_others_theirs_and_is_used_when_it_is_there(made: Made) -> None:
    grammars, backend = made()
    grammars.introduce([init(0, SLOW, 0), init(1, QUICK, 1)])
    rows = begun(grammars, 5, [0, 1, 2])
    assert backend.begun.wait(LONG)
    wait_for(grammars, 1)
    assert rows.masks().tolist() == [[0], [3], [-1]]
    outcome = rows.advance([-1, 0, 6], [2, 2, 2])
    assert (outcome.deferred, outcome.errors, outcome.complete) == ([0], {}, [])
    assert grammars.busy
    assert grammars.pop_ready() == []
    rows = begun(grammars, 6, [1])
    wait_for(grammars, 1)
    assert rows.masks().tolist() == [[6]]
    assert not rows.advance([1], [3]).deferred
    backend.go.set()
    assert grammars.pop_ready(LONG) == [(0, 5)]
    assert not grammars.busy
    rows = begun(grammars, 7, [0, 1])
    wait_for(grammars, 1)
    assert rows.masks().tolist() == [[3], [12]]
    assert not rows.advance([1, 2], [2, 4]).deferred
    assert backend.filled == [[]], "the mask that was late was not computed again"


def test_masks_are_the_same_however_often_they_are_asked_for(made: Made) -> None:
    """Rows may be sampled in parts: one that is late for a part is late for all."""
    grammars, backend = made()
    grammars.introduce([init(0, SLOW, 0)])
    rows = begun(grammars, 0, [0])
    assert backend.begun.wait(LONG)
    assert rows.masks().tolist() == [[0]]
    backend.go.set()
    assert grammars.threads.submit(grammars._constraints[0].account, int).done.wait(LONG)  # type: ignore[union-attr]
    assert rows.masks().tolist() == [[0]]
    assert rows.advance([-1], [2]).deferred == [0]
    assert grammars.pop_ready(LONG) == [(0, 0)]


@pytest.mark.parametrize("later", [[None], [None, 1], [None, 5], [None, 1, 2]])
def test_other_guesses_than_those_of_a_late_mask_sit_out(later: list[int | None], made: Made) -> None:
    grammars, backend = made()
    grammars.introduce([init(0, SLOW, 0)])
    rows = begun(grammars, 0, [0, 0], [None, 1])
    assert backend.begun.wait(LONG)
    assert rows.masks().tolist() == [[0], [0]]
    assert rows.advance([-1, -1], [2, 3]).deferred == [0]
    backend.go.set()
    assert grammars.pop_ready(LONG) == [(0, 0)]
    rows = begun(grammars, 1, [0] * len(later), later)
    right = later[1:2] == [1]
    assert rows.masks().tolist() == ([[3], [6], [0]] if right else [[3], [0]])[: len(later)]
    outcome = rows.advance([1, 2, -1][: len(later)], [2, 3, 4][: len(later)])
    assert outcome.deferred == ([2] if len(later) == 3 else [])
    if outcome.deferred:
        assert grammars.pop_ready() == [(0, 1)], "nothing has to be waited for"
    else:
        rows = begun(grammars, 2, [0])
        wait_for(grammars, 0)
        assert rows.masks().tolist() == [[12 if right else 6]]


def test_a_request_that_has_spent_its_time_ends(made: Made) -> None:
    """All its choices do, also those whose mask is there; other requests do not."""
    grammars, backend = made(busy=0.2, free_seconds=0.08)
    backend.go.set()
    grammars.introduce([init(0, SLOW, 0), init(1, SLOW, 0), init(2, QUICK, 1)])
    rows = begun(grammars, 0, [0, 1, 2])
    late = rows.advance([-1 if not mask[0] else 0 for mask in rows.masks().tolist()], [2, 2, 2]).deferred
    assert late
    while grammars.busy:
        grammars.pop_ready(LONG)
    rows = begun(grammars, 1, [0, 1, 2])
    masks = rows.masks().tolist()
    assert masks[:2] == [[0], [0]]
    outcome = rows.advance([-1, -1, 1], [2, 2, 3])
    assert outcome.errors == {0: SPENT, 1: SPENT}


def test_a_mask_that_never_comes_ends_its_choice(made: Made) -> None:
    grammars, backend = made(busy=0.05, free_seconds=0.04)
    backend.start.clear()  # its time would be over before the first step ends, on a busy machine
    grammars.introduce([init(0, SLOW, 0)])
    rows = begun(grammars, 0, [0])
    rows.masks()
    assert rows.advance([-1], [2]).deferred == [0]
    backend.start.set()
    assert backend.begun.wait(LONG)
    assert grammars.pop_ready() == [(0, 0)]
    rows = begun(grammars, 1, [0])
    assert rows.masks().tolist() == [[0]]
    assert rows.advance([-1], [2]).errors == {0: SPENT}


def test_a_slot_that_another_takes_gives_up_the_mask_in_flight(made: Made) -> None:
    grammars, backend = made()
    grammars.introduce([init(0, SLOW, 0)])
    rows = begun(grammars, 0, [0])
    assert backend.begun.wait(LONG)
    rows.masks()
    rows.advance([-1], [2])
    grammars.introduce([init(0, QUICK, 1, [0, 1])])
    assert not grammars.busy
    rows = begun(grammars, 1, [0])
    wait_for(grammars, 0)
    assert rows.masks().tolist() == [[12]]
    assert not rows.advance([2], [4]).deferred
