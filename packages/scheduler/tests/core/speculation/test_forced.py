"""Tokens that a grammar leaves no choice about follow a sampled one without steps of their own."""

import io
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Grammar,
    GrammarKind,
    LogprobParams,
    Resume,
    pack_ints,
)
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Done, Driver, FakeExecutor, request, small_capacity

GRAMMAR = Grammar(GrammarKind.REGEX, "whatever the script says")
STOP = FinishReason(FinishType.STOP)
LENGTH = FinishReason(FinishType.LENGTH)
PROMPT = [1, 2, 3]
RUN = [10, 11, 12, 13, 14]


def litany(tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Whatever is said, RUN must follow it; what follows RUN is free again."""
    last = tokens[-1]
    return (RUN[last - 9 :] if last in RUN else [] if last in PROMPT else RUN), False


def until_seven(tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Nothing is forced, and an output is complete at the first multiple of 7."""
    return (), tokens[-1] % 7 == 0


def driver(
    script: Any = litany, *, overlap: int = 0, token_budget: int = 16, pages: int = 32, page_size: int = 4, **more: Any
) -> Driver:
    shape = small_capacity(grammars="a script", pages=pages, page_size=page_size)
    config = CoreConfig(token_budget=token_budget, **more)
    return Driver(shape, config, overlap=overlap, executor=FakeExecutor(shape, grammar=script))


def rows(run: Driver) -> list[list[tuple[int, int, bool]]]:
    return [[(row.start, row.count, row.sample) for row in plan.rows] for plan in run.plans]


def test_forced_tokens_come_with_the_sampled_one_and_return_as_one_row() -> None:
    run = driver()
    run.send(request("a", PROMPT, grammar=GRAMMAR, max_new_tokens=8, ignore_eos=True))
    run.step()
    assert run.output["a", 0][1:] == RUN
    run.run()
    assert rows(run) == [[(0, 3, True)], [(3, 6, True)]]
    assert run.output["a", 0][7:] == RUN[:1]  # as far as the length allows
    assert run.core.counters.forced_tokens == 6
    assert run.finishes["a", 0] == LENGTH
    run.assert_empty()


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize(("guided", "plain"), [(1, 4), (2, 4), (3, 0)])
def test_choices_with_a_grammar_wait_for_their_results(overlap: int, guided: int, plain: int) -> None:
    """While they are few the others do not wait for them; otherwise all run together, as without overlap."""
    run = driver(overlap=overlap, token_budget=64)
    wanted = [
        request(f"r{number}", [number + 4], grammar=GRAMMAR if number < guided else None, ignore_eos=True)
        for number in range(guided + plain)
    ]
    run.send(*wanted)
    run.run()
    assert [run.output[message.rid, 0] for message in wanted] == [run.answer(message) for message in wanted]
    slot = run.plans[0].introduce[0].slot
    steps = [plan.step for plan in run.plans if any(row.slot == slot for row in plan.rows)]
    apart = 1 + overlap if guided == 1 else 1
    assert {later - earlier for earlier, later in itertools.pairwise(steps)} == {apart}
    assert len(steps) < 8
    run.assert_empty()


@pytest.mark.parametrize("beyond", [50, -2])
def test_a_forced_token_outside_the_vocabulary_ends_its_choice_alone(beyond: int) -> None:
    run = driver(lambda tokens: ([beyond] if len(tokens) == len(PROMPT) + 1 else [], False))
    run.send(request("a", PROMPT, grammar=GRAMMAR), request("b", [4, 5], max_new_tokens=3, ignore_eos=True))
    run.run()
    assert run.finishes["a", 0].type is FinishType.ERROR
    assert not run.output["a", 0]
    assert run.finishes["b", 0] == LENGTH


def test_forced_tokens_do_not_wait_for_a_long_prompt() -> None:
    run = driver(pages=128)
    long = request("long", [4] * 200, max_new_tokens=2, ignore_eos=True)
    run.send(long)
    run.step()
    guided = request("a", PROMPT, grammar=GRAMMAR, max_new_tokens=13, ignore_eos=True)
    run.send(guided)
    for _ in range(3):
        run.step()
    assert run.output["a", 0] == run.answer(guided)
    run.run()
    assert run.output["long", 0] == run.answer(long)
    run.assert_empty()


def test_an_end_among_forced_tokens_ends_there() -> None:
    run = driver()
    run.send(request("a", PROMPT, grammar=GRAMMAR, stop_token_ids=[12], max_new_tokens=20, ignore_eos=True))
    late = request("late", PROMPT, grammar=GRAMMAR, stop_token_ids=[12], min_new_tokens=5, max_new_tokens=20)
    run.send(late)
    run.run()
    assert run.output["a", 0][1:] == RUN[:3]
    assert run.finishes["a", 0] == FinishReason(FinishType.STOP, 12)
    assert run.output["late", 0] == run.answer(late)
    assert len(run.output["late", 0]) > 4
    run.assert_empty()


def test_a_complete_output_ends_with_its_last_token() -> None:
    run = driver(until_seven)
    run.send(request("a", PROMPT, n=3, grammar=GRAMMAR, max_new_tokens=60, ignore_eos=True, min_new_tokens=50))
    run.run()
    for choice in range(3):
        output = run.output["a", choice]
        assert [token % 7 == 0 for token in output] == [False] * (len(output) - 1) + [True]
        assert run.finishes["a", choice] == STOP
    run.assert_empty()


def test_what_is_complete_before_it_begins_gets_no_token() -> None:
    run = driver(until_seven)
    run.send(request("empty", [5, 7], grammar=GRAMMAR, max_new_tokens=9))
    run.output["resumed", 0] = [8, 14]
    run.send(request("resumed", PROMPT, attempt=1, resume=[Resume(0, pack_ints([8, 14]))], grammar=GRAMMAR))
    run.run()
    assert run.output["empty", 0] == []
    assert run.output["resumed", 0] == [8, 14]
    assert run.finishes["empty", 0] == run.finishes["resumed", 0] == STOP
    run.assert_empty()


def test_complete_at_the_last_token_allowed_is_a_stop() -> None:
    run = driver(lambda tokens: ((), len(tokens) == len(PROMPT) + 4))
    run.send(request("a", PROMPT, grammar=GRAMMAR, max_new_tokens=4, ignore_eos=True))
    run.run()
    assert len(run.output["a", 0]) == 4
    assert run.finishes["a", 0] == STOP


@pytest.mark.parametrize("position", range(13))
def test_resumed_anywhere_it_goes_on_as_if_unbroken(position: int) -> None:
    wanted = request("a", PROMPT, grammar=GRAMMAR, max_new_tokens=13, ignore_eos=True)
    run = driver()
    whole = run.answer(wanted)
    run.output["a", 0] = whole[:position]
    run.send(msgspec.structs.replace(wanted, attempt=1, resume=[Resume(0, pack_ints(whole[:position]))]))
    run.run()
    assert run.output["a", 0] == whole
    run.assert_empty()


def test_long_forced_runs_are_bounded_by_pages_and_budget() -> None:
    def long(tokens: Sequence[int]) -> tuple[Sequence[int], bool]:
        written = len(tokens) - len(PROMPT)
        return [9] * (31 - written) if 0 < written < 31 else (), False

    run = driver(long, page_size=4, token_budget=10)
    run.send(request("a", PROMPT, grammar=GRAMMAR, max_new_tokens=40, ignore_eos=True))
    run.step()
    assert len(run.output["a", 0]) == 31
    run.run()
    assert rows(run)[1:5] == [[(3, 10, False)], [(13, 10, False)], [(23, 10, False)], [(33, 1, True)]]
    assert len(run.output["a", 0]) == 40
    run.assert_empty()


@pytest.mark.parametrize("overlap", [0, 1])
def test_forced_runs_without_pages_retract_and_lose_no_text(overlap: int) -> None:
    run = driver(overlap=overlap, pages=14, reserve=0.0, reserve_floor=0.0)
    wanted = [
        request(name, [number + 20, *PROMPT], grammar=GRAMMAR, max_new_tokens=30, ignore_eos=True)
        for number, name in enumerate("abcd")
    ]
    run.send(*wanted)
    run.run()
    assert run.core.counters.retractions > 0
    assert {message.rid: run.output[message.rid, 0] for message in wanted} == {
        message.rid: run.answer(message) for message in wanted
    }
    run.assert_empty()


def test_with_log_probabilities_every_token_has_its_own() -> None:
    run = driver()
    run.send(request("a", PROMPT, grammar=GRAMMAR, max_new_tokens=14, ignore_eos=True, logprobs=LogprobParams()))
    run.run()
    assert run.output["a", 0][1:6] == RUN
    assert run.core.counters.forced_tokens == 0
    assert run.logprobs["a", 0] == {position: -position for position in range(14)}


def test_a_choice_whose_grammar_fails_ends_alone() -> None:
    class Failing(FakeExecutor):
        def submit(self, plan: Plan) -> Done:
            result = super().submit(plan).result()
            if plan.step == 2:
                result.token_ids[0] = -1
                result.errors[0] = "it broke"
            return Done(result)

    shape = small_capacity(grammars="a script")
    run = Driver(shape, executor=Failing(shape))
    run.send(*(request(name, PROMPT, grammar=GRAMMAR, ignore_eos=True) for name in "ab"))
    run.run()
    assert run.finishes["a", 0] == FinishReason(FinishType.ERROR, message="it broke", code="invalid_grammar")
    assert len(run.output["a", 0]) == 2
    assert len(run.output["b", 0]) == 16
    run.assert_empty()


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_event_log_replays_what_grammars_said(overlap: int) -> None:
    shape = small_capacity(grammars="a script", pages=14)
    log = io.BytesIO()
    core = RecordingScheduler(Scheduler(CoreConfig(token_budget=9), shape), LogFile(log).record)
    run = FakeExecutor(shape, grammar=litany)
    for number in range(6):
        grammar = GRAMMAR if number % 2 else None
        core.handle(Arrival("frontend-0", request(f"r{number}", PROMPT[: number + 1], grammar=grammar, n=2)))
    in_flight: list[Done] = []
    while (plan := core.schedule()) or in_flight:
        if plan:
            in_flight.append(run.submit(plan))
        if not plan or len(in_flight) > overlap:
            core.commit(in_flight.pop(0).result())
    answers = list(replay(read_events(io.BytesIO(log.getvalue()))))
    assert sum(logged is not None for _, logged, _ in answers) > 10
    assert all(logged == derived for _, logged, derived in answers)


def test_without_a_backend_grammars_are_refused() -> None:
    run = Driver(small_capacity())
    run.send(request("a", PROMPT, grammar=GRAMMAR), request("b", PROMPT))
    assert run.rejected["a"].code == "invalid_request"
    assert not run.rejected["a"].retry
    assert "b" not in run.rejected
    run.run()
