"""Tokens that are expected are computed beside the one before them, and count if they are the ones that are sampled."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import BatchTokenIDOutput, TokenizedGenerateReqInput
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Grammar,
    GrammarKind,
    LogprobParams,
    Resume,
    pack_ints,
    unpack_ints,
)
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Driver, FakeExecutor, request, small_capacity

LENGTH = FinishReason(FinishType.LENGTH)
PROMPT = [1, 2, 3]


def driver(*, overlap: int = 0, rows: int = 8, pages: int = 64, slots: int = 8, budget: int = 64) -> Driver:
    config = CoreConfig(token_budget=budget, draft_rows=rows)
    return Driver(small_capacity(pages=pages, slots=slots), config, overlap=overlap)


def wanted(
    run: Driver, rid: str, prompt: Sequence[int] = PROMPT, *, wrong: Sequence[int] = (), **more: Any
) -> TokenizedGenerateReqInput:
    """A request whose answer is predicted, but for tokens at some positions."""
    sampling = {"max_new_tokens": 16, "ignore_eos": True, **more}
    truth = run.answer(request(rid, prompt, **sampling))
    told = [(token + 1) % 50 if position in wrong else token for position, token in enumerate(truth)]
    return request(rid, prompt, prediction=told, **sampling)


def rows(plan: Plan) -> list[tuple[int, int, bool]]:
    """(start, count, whether the token there is assumed) of each row."""
    return [(row.start, row.count, index in plan.draft_tokens) for index, row in enumerate(plan.rows)]


def served(run: Driver, *asked: TokenizedGenerateReqInput) -> None:
    run.send(*asked)
    run.run()
    for message in asked:
        assert run.output[message.rid, 0] == run.answer(message)
    run.assert_empty()


def test_what_is_predicted_is_computed_at_once() -> None:
    run = driver()
    served(run, wanted(run, "a"))
    assert [rows(plan) for plan in run.plans] == [
        [(0, 3, False)],
        [(3, 1, False), *((3 + more, 1, True) for more in range(1, 6))],
        [(9, 1, False), *((9 + more, 1, True) for more in range(1, 8))],
        [(17, 1, False)],
    ]
    assert run.finishes["a", 0] == LENGTH
    counters = run.core.counters
    assert (counters.drafted_tokens, counters.accepted_tokens, counters.output_tokens) == (12, 12, 16)


def test_what_is_wrong_is_not_said_and_what_follows_it_is_computed_again() -> None:
    run = driver()
    served(run, wanted(run, "a", wrong=[3]))
    assert [rows(plan) for plan in run.plans[1:3]] == [
        [(3, 1, False), *((3 + more, 1, True) for more in range(1, 6))],
        [(6, 1, False), *((6 + more, 1, True) for more in range(1, 6))],
    ]
    assert run.core.counters.accepted_tokens == run.core.counters.drafted_tokens - 3


def test_guesses_that_are_all_wrong_become_rare() -> None:
    run = driver(pages=128)
    asked = wanted(run, "a", wrong=range(100), max_new_tokens=100)
    served(run, asked)
    assert run.core.counters.accepted_tokens == 0
    assert run.core.counters.drafted_tokens < 20
    assert len(run.plans) == 100


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_what_was_said_to_the_same_prompt_is_expected_again(overlap: int) -> None:
    run = driver(overlap=overlap, pages=128)
    prompt = list(range(1, 13))
    served(run, request("first", prompt, max_new_tokens=40, ignore_eos=True))
    before = len(run.plans)
    served(run, request("again", prompt, max_new_tokens=40, ignore_eos=True))
    assert len(run.plans) - before < 16
    served(run, request("other's", prompt, max_new_tokens=40, ignore_eos=True, salt="other"))
    assert run.core.counters.accepted_tokens == run.core.counters.drafted_tokens < 40


def test_a_choice_in_flight_is_awaited_only_for_many_draft_tokens() -> None:
    run = driver(overlap=1)
    asked = wanted(run, "a", wrong=range(3, 100), max_new_tokens=24)
    others = [request(f"r{number}", [30 + number], max_new_tokens=30, ignore_eos=True) for number in range(4)]
    served(run, asked, *others)
    slot = run.plans[0].introduce[0].slot
    steps = [plan.step for plan in run.plans if any(row.slot == slot for row in plan.rows)]
    assert any(later - earlier > 1 for earlier, later in itertools.pairwise(steps))  # it sat out
    assert run.core.counters.accepted_tokens == 2
    assert steps[-9:] == list(range(steps[-9], steps[-9] + 9))  # and no longer does


def test_where_as_many_run_as_a_step_has_room_for_nothing_is_guessed() -> None:
    run = driver(rows=4)
    served(run, *(wanted(run, f"r{number}", [number + 1]) for number in range(4)))
    assert run.core.counters.drafted_tokens == 0
    run = driver(rows=5)
    served(run, *(wanted(run, f"r{number}", [number + 1]) for number in range(4)))
    assert (len(run.plans[1].rows), len(run.plans[1].draft_tokens)) == (5, 1)


def test_room_is_shared() -> None:
    run = driver(rows=8)
    run.send(*(wanted(run, f"r{number}", [number + 1]) for number in range(2)))
    run.step()
    run.step()
    plan = run.plans[1]
    assert [(row.slot, index in plan.draft_tokens) for index, row in enumerate(plan.rows)] == [
        (0, False),
        (1, False),
        *[(0, True)] * 3,
        *[(1, True)] * 3,
    ]
    run.run()


def test_guesses_take_what_the_budget_leaves_and_come_before_prompts() -> None:
    run = driver(budget=7, rows=8, slots=2)
    run.send(wanted(run, "a"))
    run.step()
    run.send(request("long", [9] * 30, max_new_tokens=1))
    run.step()
    assert rows(run.plans[1]) == [(3, 1, False), *((3 + more, 1, True) for more in range(1, 6)), (0, 1, False)]
    run.run()
    run.assert_empty()


def test_guesses_cost_nobody_a_page() -> None:
    """They have the pages that are there, and nobody is retracted for them."""
    plain, run = driver(rows=0, pages=14), driver(pages=14)
    for each in (plain, run):
        served(each, *(wanted(each, f"r{number}", [number + 1]) for number in range(3)))
    assert run.core.counters.retractions == plain.core.counters.retractions == 0
    assert run.core.counters.accepted_tokens > 0


def test_an_end_among_guesses_ends_there() -> None:
    run = driver()
    truth = run.answer(request("t", PROMPT, ignore_eos=True))
    stop = truth[4]
    asked = request("a", PROMPT, prediction=truth, stop_token_ids=[stop], ignore_eos=True)
    late = request("late", [*PROMPT, 4], prediction=truth, stop_token_ids=[stop], min_new_tokens=7, ignore_eos=True)
    served(run, asked, late)
    assert run.finishes["a", 0] == FinishReason(FinishType.STOP, stop)
    assert run.output["a", 0] == truth[: truth.index(stop) + 1]


def test_log_probabilities_are_told_of_each_token() -> None:
    run = driver()
    served(run, wanted(run, "a", wrong=[5], logprobs=LogprobParams()))
    assert run.core.counters.accepted_tokens > 4
    assert run.logprobs["a", 0] == {position: -position for position in range(16)}


class Counting(Driver):
    """Notes how many tokens the rows of each message have."""

    counts: list[list[int]]

    def _take(self, outgoing: list[Outgoing]) -> None:
        for _, message, *_ in outgoing:
            assert isinstance(message, BatchTokenIDOutput)
            offsets = unpack_ints(message.offsets)
            self.counts.append([last - first for first, last in itertools.pairwise(offsets)])
        super()._take(outgoing)


def test_of_all_that_a_step_says_of_a_choice_there_is_one_row() -> None:
    run = Counting(small_capacity(), CoreConfig(draft_rows=8))
    run.counts = []
    served(run, wanted(run, "a"))
    assert run.counts == [[1], [6], [8], [1]]


def countdown(tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
    """After a number above 24 all below it, as far as the next multiple of 5; 17 ends an output."""
    last = tokens[-1]
    must = range(last - 1, last - last % 5 - 1, -1) if last > 24 else ()
    return must, last == 17


@pytest.mark.parametrize("seed", range(20))
def test_forced_tokens_and_stops_are_the_same_with_speculation(seed: int) -> None:
    shape = small_capacity(grammars="a script")
    run = Driver(shape, CoreConfig(draft_rows=8), executor=FakeExecutor(shape, grammar=countdown))
    asked: dict[str, Any] = {"grammar": Grammar(GrammarKind.REGEX, ""), "max_new_tokens": 30, "ignore_eos": True}
    served(run, wanted(run, "a", [seed, 1], **asked), wanted(run, "b", [seed, 2], wrong=[3, 7, 12], **asked))


def test_a_later_attempt_takes_over_in_the_middle_of_a_guess() -> None:
    run = driver(overlap=1)
    asked = wanted(run, "a", max_new_tokens=30)
    run.send(asked)
    while not (run.plans and run.plans[-1].draft_tokens):
        run.step()
    output = run.output["a", 0]
    run.send(request("a", PROMPT, attempt=1, resume=[Resume(0, pack_ints(output))], max_new_tokens=30, ignore_eos=True))
    run.run()
    assert run.output["a", 0] == run.answer(asked)
    run.assert_empty()


def test_a_log_of_guesses_replays() -> None:
    run = driver()
    file = io.BytesIO()
    core = RecordingScheduler(Scheduler(run.core.config, run.core.capacity), LogFile(file).record)
    executor = FakeExecutor(run.core.capacity)
    core.handle(Arrival("frontend-0", wanted(run, "a", wrong=[2, 9])))
    while plan := core.schedule():
        core.commit(executor.submit(plan).result())
    file.seek(0)
    plans = list(replay(read_events(file)))
    assert any(logged is not None and logged.draft_tokens for _, logged, _ in plans)
    assert all(logged == derived for _, logged, derived in plans)
