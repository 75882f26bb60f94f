"""Scenarios: messages in, plans out."""

import msgspec
import pytest

from tercet.protocol.messages.messages import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    ExclusiveReady,
    FlushCacheReq,
    PauseGenerationReq,
)
from tercet.protocol.messages.values import FinishReason, FinishType, LogprobParams, Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, Drain, PeerBlocked, PeerDrained, PeerGone
from tercet.scheduler.core.plan import Row, StepResult
from tercet.scheduler.testing import Driver, request, small_capacity

PROMPT = [7, 3, 9, 4, 1, 8, 2, 6, 5]


def driver(**options: int | float | bool | str) -> Driver:
    """A core with room to spare, unless said otherwise."""
    capacity = {name: options.pop(name) for name in ("pages", "page_size", "slots") if name in options}
    overlap = options.pop("overlap", 0)
    config = CoreConfig(**{"token_budget": 16, **options})  # type: ignore[arg-type]
    return Driver(small_capacity(**{"pages": 64, **capacity}), config, overlap=int(overlap))  # type: ignore[arg-type]


def rows(run: Driver) -> list[list[tuple[int, int, bool]]]:
    return [[(row.start, row.count, row.sample) for row in plan.rows] for plan in run.plans]


def test_a_prompt_is_prefilled_once_and_decoded_token_by_token() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=3, ignore_eos=True))
    run.run()
    assert rows(run) == [[(0, 9, True)], [(9, 1, True)], [(10, 1, True)]]
    assert run.output["a", 0] == run.expected(PROMPT, 3)
    assert run.finishes["a", 0] == FinishReason(FinishType.LENGTH)
    run.assert_empty()


def test_a_long_prompt_is_cut_into_chunks_beside_running_decodes() -> None:
    run = driver(token_budget=5, slots=2)
    run.send(request("a", [1, 2], max_new_tokens=8, ignore_eos=True))
    run.step()
    run.send(request("b", PROMPT, max_new_tokens=1, ignore_eos=True))
    run.run()
    assert rows(run)[1:4] == [
        [(2, 1, True), (0, 4, False)],
        [(3, 1, True), (4, 4, False)],
        [(4, 1, True), (8, 1, True)],
    ]
    assert run.core.counters.chunks == 2
    assert run.core.counters.mixed_steps == 2


def test_a_second_request_finds_the_first_ones_prompt() -> None:
    run = driver(page_size=4)
    run.send(request("a", PROMPT, max_new_tokens=2, ignore_eos=True))
    run.run()
    run.send(request("b", PROMPT, max_new_tokens=2, ignore_eos=True))
    run.run()
    assert rows(run)[2] == [(8, 1, True)]
    assert run.core.counters.cached_tokens == 8
    assert run.output["b", 0] == run.output["a", 0]


def test_the_prompt_can_be_shared_while_the_first_still_runs() -> None:
    run = driver(page_size=4)
    run.send(request("a", PROMPT, max_new_tokens=9, ignore_eos=True))
    run.step()
    run.send(request("b", PROMPT, max_new_tokens=2, ignore_eos=True))
    run.step()
    assert rows(run)[1] == [(9, 1, True), (8, 1, True)]


def test_equal_prompts_that_prefill_together_end_up_on_the_same_pages() -> None:
    run = driver(page_size=4, token_budget=64)
    run.send(request("a", PROMPT, max_new_tokens=9), request("b", PROMPT, max_new_tokens=9))
    run.step()
    first, second = run.core.planner.running
    assert first.pages[0][:2] == second.pages[0][:2]
    assert run.core.memory.cache.cached == 2
    run.run()
    run.assert_empty()


def test_replaced_pages_are_free_after_the_last_plan_that_names_them() -> None:
    run = driver(page_size=4, token_budget=64, overlap=1)
    run.send(request("a", PROMPT, max_new_tokens=9), request("b", PROMPT, max_new_tokens=9))
    plans = [run.core.schedule(), run.core.schedule()]
    first, second = (run.executor.submit(plan).result() for plan in plans if plan is not None)
    before = run.core.memory.pools.free
    run.core.commit(first)
    assert len(run.core.memory.deferred_free) == 1
    assert run.core.memory.pools.free == before
    run.core.commit(second)
    assert not run.core.memory.deferred_free
    assert run.core.memory.pools.free == before + 2


@pytest.mark.parametrize("radix", [True, False])
def test_choices_share_one_prefill_and_copy_the_last_partial_page(radix: bool) -> None:
    run = driver(page_size=4, radix_cache=radix)
    prompt = [*PROMPT, 3, 3]
    run.send(request("a", prompt, n=3, max_new_tokens=5, ignore_eos=True))
    run.run()
    assert rows(run)[0] == [(0, 11, True)]
    assert rows(run)[1] == [(11, 1, True), (10, 1, True), (10, 1, True)]
    assert len(run.plans[1].copies) == 2
    assert run.core.counters.forks == 2
    assert len({tuple(run.output["a", index]) for index in range(3)}) == 3
    run.assert_empty()


def test_retracted_requests_end_with_the_text_they_would_have_had() -> None:
    run = driver(pages=12, page_size=4, slots=4, reserve=0.0, reserve_floor=0.0)
    for name in "abcd":
        run.send(request(name, [ord(name) % 50, *PROMPT], max_new_tokens=24, ignore_eos=True))
    run.run()
    assert run.core.counters.retractions > 0
    for name in "abcd":
        assert len(run.output[name, 0]) == 24
        tokens = [ord(name) % 50, *PROMPT]
        for token in run.output[name, 0]:
            assert token == run.fake.next_token(tokens)
            tokens.append(token)
    run.assert_empty()


def test_a_stop_id_ends_a_choice_unless_it_comes_too_early() -> None:
    run = driver()
    tokens = run.expected(PROMPT, 6)
    run.send(request("a", PROMPT, stop_token_ids=[tokens[2]], max_new_tokens=6))
    run.send(request("b", PROMPT, stop_token_ids=[tokens[2]], min_new_tokens=5, max_new_tokens=6))
    run.run()
    assert run.output["a", 0] == tokens[:3]
    assert run.finishes["a", 0] == FinishReason(FinishType.STOP, tokens[2])
    assert len(run.output["b", 0]) >= 5
    assert tokens[2] not in run.output["b", 0][:4]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_an_abort_frees_everything_at_any_stage(overlap: int, steps: int) -> None:
    run = driver(overlap=overlap, slots=2, token_budget=4)
    run.send(request("a", PROMPT, n=4, max_new_tokens=50, ignore_eos=True))
    for _ in range(steps):
        run.step()
    run.send(AbortReq(rid="a", reason="the client left"))
    run.run()
    assert {run.finishes["a", index].type for index in range(4)} == {FinishType.ABORT}
    assert not run.core.runnable
    run.assert_empty()


def test_one_choice_can_be_aborted_alone() -> None:
    run = driver()
    run.send(request("a", PROMPT, n=2, max_new_tokens=5, ignore_eos=True))
    run.send(AbortReq(rid="a", indices=[0]))
    run.run()
    assert run.finishes["a", 0].type == FinishType.ABORT
    assert run.finishes["a", 1].type == FinishType.LENGTH
    assert len(run.output["a", 1]) == 5


def test_a_lost_frontend_takes_its_requests_along() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=50, ignore_eos=True))
    run.step()
    run.send(PeerGone("frontend-0"))
    run.run()
    assert ("a", 0) not in run.finishes
    run.assert_empty()


def test_nothing_is_planned_for_a_blocked_detokenizer() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=5, ignore_eos=True))
    run.step()
    run.send(PeerBlocked("detokenizer-0"))
    assert not run.core.runnable
    assert run.core.schedule() is None
    run.send(PeerDrained("detokenizer-0"))
    run.run()
    assert len(run.output["a", 0]) == 5


@pytest.mark.parametrize(
    ("wanted", "code"),
    [
        (request("a", [1] * 200, max_new_tokens=100), "context_length_exceeded"),
        (request("a", [], max_new_tokens=1), "invalid_token_ids"),
        (request("a", [1, 50], max_new_tokens=1), "invalid_token_ids"),
        (request("a", [-1], max_new_tokens=1), "invalid_token_ids"),
    ],
)
def test_what_cannot_run_is_refused_with_a_reason(wanted: object, code: str) -> None:
    run = driver()
    run.send(wanted)  # type: ignore[arg-type]
    assert run.rejected["a"].code == code
    run.assert_empty()


def test_a_full_queue_refuses_new_requests_but_never_resumed_ones() -> None:
    run = driver(max_queued=2)
    for name in "abc":
        run.send(request(name, PROMPT))
    assert run.rejected["c"].code == "overloaded"
    assert run.rejected["c"].retry
    run.send(request("d", PROMPT, attempt=1, resume=[Resume(0)]))
    assert "d" not in run.rejected


def test_a_resumed_request_goes_on_at_its_position() -> None:
    run = driver()
    whole = run.expected(PROMPT, 8)
    run.output["a", 0] = whole[:3]
    run.send(request("a", PROMPT, attempt=1, max_new_tokens=8, resume=[Resume(0, pack_ints(whole[:3]))]))
    run.run()
    assert run.output["a", 0] == whole
    assert run.plans[0].introduce[0].prompt_tokens == len(PROMPT)


def test_a_later_attempt_keeps_its_slot_and_resends_lost_rows() -> None:
    run = driver()
    whole = run.expected(PROMPT, 12)
    run.send(request("a", PROMPT, max_new_tokens=12))
    for _ in range(5):
        run.step()
    run.output["a", 0] = whole[:2]
    run.send(request("a", PROMPT, attempt=1, max_new_tokens=12, resume=[Resume(0, pack_ints(whole[:2]))]))
    assert run.output["a", 0] == whole[:5]
    run.run()
    assert run.output["a", 0] == whole
    assert sum(len(plan.introduce) for plan in run.plans) == 1


def test_an_equal_or_lower_attempt_is_ignored() -> None:
    run = driver()
    run.send(request("a", PROMPT, attempt=1, max_new_tokens=2, ignore_eos=True))
    run.send(request("a", PROMPT, attempt=1), request("a", PROMPT, attempt=0))
    run.run()
    assert run.core.counters.ignored == 2
    assert len(run.output["a", 0]) == 2


def test_a_resumed_choice_that_had_ended_is_only_told_so() -> None:
    run = driver()
    run.output["a", 0] = [5, 0]
    run.send(request("a", PROMPT, attempt=1, resume=[Resume(0, pack_ints([5, 0]))]))
    assert run.finishes["a", 0] == FinishReason(FinishType.STOP, 0)
    assert run.plans == []
    run.assert_empty()


def test_prompt_scoring_computes_every_position_and_samples_nothing() -> None:
    run = driver(token_budget=4, slots=2)
    run.send(request("warm", PROMPT, max_new_tokens=1))
    run.run()
    before = len(run.plans)
    run.send(request("a", PROMPT, max_new_tokens=0, logprobs=LogprobParams(prompt=True)))
    run.run()
    assert [row for plan in rows(run)[before:] for row in plan] == [(0, 4, False), (4, 4, False), (8, 1, False)]
    assert len(run.prompt_logprobs["a", 0]) == len(PROMPT)
    assert run.output["a", 0] == []
    assert run.finishes["a", 0].type == FinishType.LENGTH


def test_every_output_token_has_its_log_probability() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=6, ignore_eos=True, logprobs=LogprobParams()))
    run.run()
    assert run.logprobs["a", 0] == {position: -float(position) for position in range(6)}


def test_logits_that_are_not_finite_end_one_choice_only() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=4, ignore_eos=True), request("b", [4, 4], max_new_tokens=4))
    plan = run.core.schedule()
    assert plan is not None
    result = run.executor.submit(plan).result()
    broken = StepResult(step=result.step, token_ids=[-1, *result.token_ids[1:]])
    run._take(run.core.commit(broken))
    run.check()
    assert run.finishes["a", 0].type == FinishType.ERROR
    assert run.core.memory.cache.measure("/", pack_ints(PROMPT)) == 0
    run.run()
    assert run.finishes["b", 0].type in {FinishType.LENGTH, FinishType.STOP}
    run.assert_empty()


def test_a_pause_keeps_requests_and_a_flush_forgets_prefixes() -> None:
    run = driver(page_size=4)
    run.send(request("a", PROMPT, max_new_tokens=2))
    run.send(PauseGenerationReq(id="p"))
    assert not run.core.runnable
    assert run.core.schedule() is None
    run.send(ContinueGenerationReq(id="c"))
    run.run()
    assert run.core.memory.cache.cached > 0
    run.send(FlushCacheReq(id="f"))
    assert run.core.memory.cache.cached == 0
    assert [message.id for _, message, *_ in run.others if isinstance(message, ControlReply)] == ["p", "c", "f"]


def test_overlap_plans_the_next_step_before_the_last_one_is_known() -> None:
    run = driver(overlap=1)
    run.send(request("a", PROMPT, max_new_tokens=4, ignore_eos=True))
    run.run()
    assert run.output["a", 0] == run.expected(PROMPT, 4)[:4]
    core = driver().core
    core.handle(Arrival("frontend-0", request("a", PROMPT, max_new_tokens=2, ignore_eos=True)))
    first, second = core.schedule(), core.schedule()
    assert first is not None
    assert second is not None
    assert second.rows == [Row(first.rows[0].slot, 9, 1, True)]
    assert core.schedule() is None


def test_a_result_that_answers_another_plan_is_refused() -> None:
    run = driver()
    run.send(request("a", PROMPT))
    plan = run.core.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match="does not answer"):
        run.core.commit(StepResult(step=plan.step + 1, token_ids=[1]))


def test_a_suspect_runs_alone_and_the_others_wait_their_turn() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=4, ignore_eos=True))
    run.step()
    run.send(request("suspect", [5, 5], max_new_tokens=3, ignore_eos=True, alone=True), request("b", [6], n=2))
    run.run()
    suspect = next(init.slot for plan in run.plans for init in plan.introduce if init.prompt_tokens == 2)
    beside = [len(plan.rows) for plan in run.plans[4:7]]
    assert beside == [1, 1, 1]
    assert all(plan.rows[0].slot == suspect for plan in run.plans[4:7])
    assert {key[0] for key in run.finishes} == {"a", "suspect", "b"}


def test_an_exclusive_request_starts_after_its_frontend_was_notified() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=4, ignore_eos=True))
    run.step()
    suspect = {"max_new_tokens": 3, "ignore_eos": True, "alone": True}
    run.send(request("suspect", [5, 5], attempt=2, hold=True, resume=[Resume(0)], **suspect))  # type: ignore[arg-type]
    other = request("suspect", [7], attempt=2, hold=True, resume=[Resume(0)], **suspect)  # type: ignore[arg-type]
    run.send(other, source="frontend-1")
    run.send(request("b", [6]))
    run.run()
    assert run.finishes.keys() == {("a", 0)}
    assert run.others == [("frontend-0", ExclusiveReady(rid="suspect", attempt=2))]
    run.send(request("eager", [8], attempt=1, resume=[Resume(0)], priority=9))
    run.run()
    assert ("eager", 0) not in run.finishes, "nobody starts before it"
    run.send(request("suspect", [5, 5], attempt=3, resume=[Resume(0)], **suspect))  # type: ignore[arg-type]
    assert run.core.schedule() is not None
    assert [req.rid for req in run.core.planner.running] == ["suspect"]


@pytest.mark.parametrize("end", ["abort", "gone", "asked again"])
def test_a_suspect_that_is_held_keeps_nobody_waiting_that_outlives_it(end: str) -> None:
    run = driver()
    suspect = request("suspect", [5, 5], attempt=2, hold=True, resume=[Resume(0)], alone=True)
    run.send(suspect, source="frontend-1")
    run.send(request("b", [6]))
    run.run()
    assert [peer for peer, *_ in run.others] == ["frontend-1"]
    assert run.finishes == {}
    match end:
        case "abort":
            run.send(AbortReq(rid="suspect"), source="frontend-1")
        case "gone":
            run.send(PeerGone("frontend-1"))
        case _:
            run.send(msgspec.structs.replace(suspect, attempt=3), source="frontend-1")
            assert [message for _, message, *_ in run.others[1:]] == [ExclusiveReady(rid="suspect", attempt=3)]
            run.send(msgspec.structs.replace(suspect, attempt=4, deferred=False), source="frontend-1")
    run.run()
    assert ("b", 0) in run.finishes
    run.assert_empty()


def test_a_draining_core_finishes_what_it_holds_and_takes_nothing_new() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=4, ignore_eos=True))
    run.send(Drain())
    run.send(request("b", PROMPT), request("c", PROMPT, attempt=1, resume=[Resume(0)]))
    run.run()
    assert run.finishes["a", 0].type == FinishType.LENGTH
    assert run.rejected["b"].code == run.rejected["c"].code == "draining"
    assert run.rejected["b"].retry
    assert run.core.empty
