"""A choice whose mask is late sits out steps, in which all others go on, and loses no token by it."""

import io
from collections.abc import Callable
from typing import Any

import pytest

from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import FinishReason, FinishType, Grammar, GrammarKind, LogprobParams
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, MaskReady
from tercet.scheduler.core.plan import Plan, Row
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.diagnostics.event_log import LogFile, RecordingScheduler, read_events, replay
from tercet.scheduler.testing import Done, Driver, FakeExecutor, request, small_capacity

GRAMMAR = Grammar(GrammarKind.REGEX, "whatever the script says")
PROMPT = [1, 2, 3]

Defers = Callable[[Plan, Row], bool]


def always(_: Plan, __: Row) -> bool:
    return True


def every_third(plan: Plan, _: Row) -> bool:
    return plan.step % 3 == 0


def driver(defers: Defers, *, overlap: int = 0, pages: int = 32, **more: Any) -> Driver:
    shape = small_capacity(grammars="a script", pages=pages)
    config = CoreConfig(token_budget=16, **more)
    return Driver(shape, config, overlap=overlap, executor=FakeExecutor(shape, defers=defers))


@pytest.mark.parametrize("overlap", [0, 1])
def test_others_go_on_while_a_mask_is_late(overlap: int) -> None:
    run = driver(always, overlap=overlap)
    run.fake.late_masks.held_back = True
    plain = request("plain", [4, 5], max_new_tokens=9, ignore_eos=True)
    run.send(request("slow", PROMPT, grammar=GRAMMAR, ignore_eos=True), plain)
    run.run()
    assert run.output["plain", 0] == run.answer(plain)
    assert ("slow", 0) not in run.output
    slow_rows = [row for plan in run.plans for row in plan.rows if row.slot == run.plans[0].introduce[0].slot]
    assert len(slow_rows) == 1, "it sits out until its mask is there"
    assert not run.core.runnable


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("logprobs", [None, LogprobParams(prompt=True)])
def test_late_masks_change_no_token(overlap: int, logprobs: LogprobParams | None) -> None:
    run = driver(every_third, overlap=overlap)
    wanted = [
        request(f"r{number}", [number, *PROMPT * 7], grammar=GRAMMAR, ignore_eos=True, n=2, logprobs=logprobs)
        for number in range(3)
    ]
    run.send(*wanted)
    run.run()
    for message in wanted:
        for choice in range(2):
            assert run.output[message.rid, choice] == run.answer(message, choice)
            if logprobs is not None:
                assert run.logprobs[message.rid, choice] == {position: -position for position in range(16)}
                assert len(run.prompt_logprobs[message.rid, choice]) == 22
    run.assert_empty()


def test_guesses_behind_a_late_row_do_not_count() -> None:
    run = driver(every_third, draft_rows=8)
    wanted = request("a", [7, 8, 9, 7, 8, 9], grammar=GRAMMAR, max_new_tokens=24, ignore_eos=True)
    prediction = run.answer(wanted)
    wanted = request(
        "a", [7, 8, 9, 7, 8, 9], grammar=GRAMMAR, max_new_tokens=24, ignore_eos=True, prediction=prediction
    )
    run.send(wanted)
    run.run()
    assert any(plan.draft_tokens for plan in run.plans)
    assert run.output["a", 0] == run.answer(wanted)
    run.assert_empty()


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_choice_that_sits_out_can_be_aborted_and_its_slot_used(overlap: int) -> None:
    run = driver(always, overlap=overlap)
    late = run.fake.late_masks
    late.held_back = True
    run.send(request("slow", PROMPT, grammar=GRAMMAR))
    run.run()
    run.send(AbortReq(rid="slow"))
    run.assert_empty()
    plain = request("plain", PROMPT, max_new_tokens=4, ignore_eos=True)
    run.send(plain)
    run.step()
    run.send(*(MaskReady(*each) for each in late.waiting))  # whose slot another has now
    run.run()
    assert run.output["plain", 0] == run.answer(plain)
    run.assert_empty()


def test_a_choice_aborted_in_flight_leaves_its_pages_in_the_cache() -> None:
    run = driver(always, overlap=1)
    run.send(request("slow", [1, 2, 3, 4, 5], grammar=GRAMMAR))
    run.step()
    run.send(AbortReq(rid="slow"))
    run.run()
    run.assert_empty()
    assert run.core.memory.cache.cached == 1


def test_a_choice_that_sits_out_can_be_retracted() -> None:
    run = driver(lambda plan, _: plan.step == 0, pages=12)
    run.fake.late_masks.held_back = True
    slow = request("slow", PROMPT, grammar=GRAMMAR, max_new_tokens=8, ignore_eos=True, priority=-1)
    others = [request(f"r{n}", [n, 6, 7], max_new_tokens=12, ignore_eos=True) for n in range(4)]
    run.send(slow)
    run.step()
    run.send(*others)
    run.run()
    assert run.core.counters.retractions > 0
    assert all(run.output[message.rid, 0] == run.answer(message) for message in [slow, *others])
    run.assert_empty()


def test_what_a_grammar_cost_too_much_ends_with_a_code() -> None:
    class Spent(FakeExecutor):
        def submit(self, plan: Plan) -> Done:
            result = super().submit(plan).result()
            if plan.step == 3:
                result.token_ids[0] = -1
                result.deferred.clear()
                result.errors[0] = "too costly"
            return Done(result)

    shape = small_capacity(grammars="a script")
    run = Driver(shape, executor=Spent(shape, defers=lambda plan, _: plan.step == 2))
    run.send(request("a", PROMPT, grammar=GRAMMAR, ignore_eos=True))
    run.run()
    assert run.finishes["a", 0] == FinishReason(FinishType.ERROR, message="too costly", code="invalid_grammar")
    assert len(run.output["a", 0]) == 2
    run.assert_empty()


def test_choices_of_one_request_are_told_to_be_of_one() -> None:
    run = driver(every_third)
    run.send(request("a", PROMPT, grammar=GRAMMAR, n=3), request("b", PROMPT, grammar=GRAMMAR, n=2))
    run.run()
    numbers = [init.request for plan in run.plans for init in plan.introduce]
    assert sorted(numbers) == [0, 0, 0, 3, 3]


@pytest.mark.parametrize("overlap", [0, 1])
def test_an_event_log_replays_late_masks(overlap: int) -> None:
    shape = small_capacity(grammars="a script", pages=14)
    log = io.BytesIO()
    core = RecordingScheduler(Scheduler(CoreConfig(token_budget=9), shape), LogFile(log).record)
    run = FakeExecutor(shape, defers=every_third)
    for number in range(6):
        grammar = GRAMMAR if number % 2 else None
        core.handle(Arrival("frontend-0", request(f"r{number}", PROMPT[: number + 1], grammar=grammar, n=2)))
    in_flight: list[Done] = []
    told = 0
    while (plan := core.schedule()) or in_flight or run.late_masks.busy:
        if plan:
            in_flight.append(run.submit(plan))
        if in_flight and (not plan or len(in_flight) > overlap):
            core.commit(in_flight.pop(0).result())
        if not in_flight or overlap:
            ready = run.late_masks.pop_ready()
            told += len(ready)
            core.handle(*(Arrival("", MaskReady(*each)) for each in ready))
    assert told > 1
    assert core.empty
    answers = list(replay(read_events(io.BytesIO(log.getvalue()))))
    assert all(logged == derived for _, logged, derived in answers)
