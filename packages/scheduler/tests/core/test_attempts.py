"""Attempts, frontends and choices: who goes on, who is given up, and that nobody gets another's tokens."""

from typing import Any

import msgspec
import pytest

from tercet.protocol.messages.messages import AbortReq, BatchTokenIDOutput, ContinueGenerationReq, PauseGenerationReq
from tercet.protocol.messages.values import FinishReason, FinishType, LogprobParams, Resume, pack_ints, unpack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.events import Arrival, Drain, PeerGone
from tercet.scheduler.testing import Driver, request, small_capacity

PROMPT = [7, 3, 9, 4, 1, 8, 2, 6, 5]
OTHER = [5, 5, 5]


def driver(*, overlap: int = 0, slots: int = 8, pages: int = 64, **config: Any) -> Driver:
    return Driver(
        small_capacity(pages=pages, slots=slots), CoreConfig(**{"token_budget": 16, **config}), overlap=overlap
    )


def held(run: Driver, frontend: str = "frontend-0") -> list[tuple[str, int, int]]:
    """(rid, index, attempt) of what a frontend would hear it has here."""
    given = run.core.held().get(frontend)
    if given is None:
        return []
    return sorted(zip(given.rids, unpack_ints(given.indices), unpack_ints(given.attempts), strict=True))


def test_equal_rids_of_two_frontends_are_two_requests() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=30, ignore_eos=True))
    run.step()
    other = request("a", OTHER, max_new_tokens=30, ignore_eos=True, detokenizer="detokenizer-1")
    run.send(other, source="frontend-1")
    run.step()
    assert run.output["frontend-1/a", 0] == run.answer(other, 0)[:1]
    assert held(run) == held(run, "frontend-1") == [("a", 0, 0)]
    run.send(AbortReq(rid="a"), source="frontend-1")
    assert held(run) == [("a", 0, 0)]
    assert held(run, "frontend-1") == []
    run.send(PeerGone("frontend-1"))
    assert held(run) == [("a", 0, 0)]


def test_a_later_attempt_from_another_frontend_takes_nothing_over() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=30, ignore_eos=True))
    run.step()
    run.send(request("a", PROMPT, attempt=1, resume=[Resume(0)]), source="frontend-1")
    assert held(run) == [("a", 0, 0)]
    assert held(run, "frontend-1") == [("a", 0, 1)]


def test_a_later_attempt_with_another_prompt_starts_anew() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=30, ignore_eos=True))
    run.step()
    run.output.clear()
    wanted = request("a", OTHER, attempt=1, resume=[Resume(0)], max_new_tokens=30, ignore_eos=True)
    run.send(wanted)
    run.run()
    assert run.output["a", 0] == run.answer(wanted, 0)
    run.assert_empty()


def test_a_refused_later_attempt_leaves_nothing_of_the_earlier_one() -> None:
    run = driver()
    run.send(request("a", PROMPT, n=3, max_new_tokens=30, ignore_eos=True))
    run.step()
    run.send(Drain(), request("a", PROMPT, attempt=1, n=3, resume=[Resume(1)]))
    assert run.rejected["a"].code == "draining"
    assert held(run) == []
    run.run()
    run.assert_empty()


def test_a_suspect_is_alone_from_the_attempt_that_says_so() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=9, ignore_eos=True))
    run.step()
    run.send(request("a", PROMPT, attempt=1, resume=[Resume(0)], max_new_tokens=9, ignore_eos=True, alone=True))
    run.send(request("b", OTHER, max_new_tokens=2, ignore_eos=True))
    run.run()
    assert max(len(plan.rows) for plan in run.plans) == 1


def test_choices_of_a_request_that_runs_alone_run_one_after_another() -> None:
    run = driver()
    run.send(request("a", PROMPT, n=3, max_new_tokens=4, ignore_eos=True, alone=True))
    run.send(request("b", OTHER, max_new_tokens=4, ignore_eos=True))
    run.run()
    assert max(len(plan.rows) for plan in run.plans) == 1
    assert sorted(run.finishes) == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]


def test_the_heir_of_a_waiting_leader_keeps_its_place() -> None:
    """An abort of the choice that leads must not carry the others past those who came before."""
    run = driver(slots=1)
    run.send(request("running", OTHER, max_new_tokens=4, ignore_eos=True))
    run.step()
    run.send(request("first", [6, 6], max_new_tokens=1), request("later", PROMPT, n=2, max_new_tokens=1))
    run.send(AbortReq(rid="later", indices=[0]))
    run.run()
    order = list(run.finishes)
    assert order.index(("first", 0)) < order.index(("later", 1))


def test_followers_count_as_queued() -> None:
    run = driver(max_queued=6)
    run.send(request("a", PROMPT, n=4), request("b", PROMPT, n=4), request("c", PROMPT, n=2))
    assert run.rejected["b"].code == "overloaded"
    assert "c" not in run.rejected
    assert run.core.load().queued == 6


def test_a_pause_ends_with_the_frontend_that_asked_for_it() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=2, ignore_eos=True))
    run.send(PauseGenerationReq(id="p"), source="frontend-1")
    assert run.core.schedule() is None
    run.send(PeerGone("frontend-2"))
    assert run.core.schedule() is None
    run.send(PeerGone("frontend-1"))
    run.run()
    assert len(run.output["a", 0]) == 2


def test_anybody_can_end_a_pause() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=2, ignore_eos=True))
    run.send(PauseGenerationReq(id="p"), source="frontend-1")
    run.send(ContinueGenerationReq(id="c"))
    run.run()
    assert len(run.output["a", 0]) == 2


def test_prompt_logprobs_are_sent_once_after_recomputation() -> None:
    run = driver(token_budget=8)
    prompt = [*PROMPT, *PROMPT[:3]]
    run.send(request("a", prompt, max_new_tokens=4, ignore_eos=True, logprobs=LogprobParams(prompt=True)))
    run.step()
    req = next(iter(run.core.planner.running))
    assert 0 < req.computed < req.prompt_tokens
    run.core.planner.retract(req)
    run.run()
    assert len(run.prompt_logprobs["a", 0]) == 12
    assert run.finishes["a", 0].type == FinishType.LENGTH


def test_a_scored_prompt_is_not_scored_again_after_a_retraction() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=6, ignore_eos=True, logprobs=LogprobParams(prompt=True)))
    run.step()
    run.step()
    req = next(iter(run.core.planner.running))
    run.core.planner.retract(req)
    run.send(request("a", PROMPT, attempt=1, max_new_tokens=6, ignore_eos=True, logprobs=LogprobParams(prompt=True)))
    run.run()
    assert len(run.prompt_logprobs["a", 0]) == len(PROMPT)
    assert [init.prompt_logprobs for plan in run.plans for init in plan.introduce] == [True, False]


@pytest.mark.parametrize("radix", [True, False])
def test_choices_of_a_scored_prompt_share_its_logprobs_and_its_prefill(radix: bool) -> None:
    run = driver(radix_cache=radix)
    wanted = request("a", PROMPT, n=4, max_new_tokens=2, ignore_eos=True, logprobs=LogprobParams(prompt=True))
    run.send(wanted)
    run.run()
    told = [float(-position) for position in range(1, len(PROMPT))]
    assert [run.prompt_logprobs["a", index][1:] for index in range(4)] == [told] * 4
    assert [run.output["a", index] for index in range(4)] == [run.answer(wanted, index) for index in range(4)]
    assert sum(row.count for plan in run.plans for row in plan.rows) == len(PROMPT) + 3 + 4
    run.assert_empty()


def test_a_follower_keeps_the_logprobs_of_its_prompt_through_a_retraction() -> None:
    run = driver()
    wanted = request("a", PROMPT, n=4, max_new_tokens=6, ignore_eos=True, logprobs=LogprobParams(prompt=True))
    run.send(wanted)
    run.step()
    run.step()
    run.core.planner.retract(next(req for req in run.core.planner.running if req.index == 2))
    run.prompt_logprobs.clear()
    run.send(msgspec.structs.replace(wanted, attempt=1))
    run.run()
    told = [float(-position) for position in range(1, len(PROMPT))]
    assert [run.prompt_logprobs["a", index][1:] for index in range(4)] == [told] * 4
    assert [init.prompt_logprobs for plan in run.plans for init in plan.introduce] == [True] + [False] * 4
    run.assert_empty()


def test_an_abort_before_scoring_ends_sends_no_prompt_logprobs() -> None:
    run = driver(token_budget=8)
    run.send(request("a", PROMPT, logprobs=LogprobParams(prompt=True)))
    run.step()
    run.send(AbortReq(rid="a"))
    assert run.finishes["a", 0].type == FinishType.ABORT
    assert run.prompt_logprobs == {}


def test_a_choice_that_ended_in_flight_is_replaced_by_its_later_attempt() -> None:
    run = driver(overlap=1)
    whole = run.expected(PROMPT, 8)
    run.send(request("a", PROMPT, max_new_tokens=8, stop_token_ids=[whole[2]]))
    while ("a", 0) not in run.finishes:
        run.step()
    assert held(run) == []
    assert not run.core.empty
    del run.finishes["a", 0]
    run.send(request("a", PROMPT, attempt=1, max_new_tokens=8, resume=[Resume(0, pack_ints(whole[:2]))]))
    run.run()
    assert run.output["a", 0][:2] == whole[:2]
    run.assert_empty()


def test_choices_that_a_later_attempt_leaves_out_are_given_up() -> None:
    run = driver()
    run.send(request("a", PROMPT, n=4, max_new_tokens=30, ignore_eos=True))
    for _ in range(3):
        run.step()
    run.send(request("a", PROMPT, n=4, max_new_tokens=30, ignore_eos=True, attempt=1, resume=[Resume(2)]))
    assert held(run) == [("a", 2, 1)]
    assert [req.index for req in run.core.planner.running] == [2]


def test_a_lost_frontend_takes_along_what_runs_waits_and_follows() -> None:
    run = driver(slots=1)
    run.send(request("a", PROMPT, n=3), request("b", PROMPT, n=3))
    run.step()
    run.send(PeerGone("frontend-0"))
    run.assert_empty()


def test_a_detokenizer_that_loses_a_choice_to_another_is_told_to_forget_it() -> None:
    run = driver()
    first = request("a", PROMPT, max_new_tokens=8, ignore_eos=True, detokenizer="d-0")
    whole = run.answer(first, 0)
    run.send(first)
    for _ in range(3):
        run.step()
    resume = [Resume(0, pack_ints(whole[:2]))]
    later = request("a", PROMPT, attempt=1, max_new_tokens=8, ignore_eos=True, detokenizer="d-1", resume=resume)
    told = {peer: message for peer, message, *_ in run.core.handle(Arrival("frontend-0", later))}
    closing, opening = told["d-0"], told["d-1"]
    assert isinstance(closing, BatchTokenIDOutput)
    assert isinstance(opening, BatchTokenIDOutput)
    assert [*unpack_ints(closing.attempts), *unpack_ints(closing.positions)] == [0, 3]
    assert (closing.token_ids, closing.finishes[0].type) == (b"", FinishType.ABORT)
    assert [*unpack_ints(opening.attempts), *unpack_ints(opening.positions)] == [1, 2]
    assert list(unpack_ints(opening.token_ids)) == whole[2:3]
    assert not opening.finishes


def test_a_detokenizer_drops_choices_that_a_later_attempt_leaves_out() -> None:
    run = driver()
    run.send(request("a", PROMPT, max_new_tokens=8, ignore_eos=True, n=2))
    for _ in range(3):
        run.step()
    resume = [Resume(0, pack_ints(run.output["a", 0][:1]))]
    run.send(request("a", PROMPT, attempt=1, max_new_tokens=8, ignore_eos=True, n=2, resume=resume))
    assert run.finishes["a", 1].type == FinishType.ABORT
    run.run()
    assert run.finishes["a", 0].type == FinishType.LENGTH
    run.assert_empty()


def test_a_peer_s_name_is_no_name_of_its_requests() -> None:
    run = driver()
    run.send(request("frontend-a.b-secret", PROMPT, max_new_tokens=30, ignore_eos=True))
    for guess in ("frontend-a", "frontend-a.b", "frontend-a.b-", "."):
        run.send(AbortReq(rid=guess, user_requested=True), source="frontend-1")
    assert held(run) == [("frontend-a.b-secret", 0, 0)]


def test_an_abort_that_was_asked_for_ends_what_comes_later_too() -> None:
    """It waited at its frontend, or its answer was lost and it comes again."""
    run = driver()
    run.send(AbortReq(rid="own"))
    for name in ("late", *map(str, range(4000))):
        run.send(AbortReq(rid=name, reason="told", user_requested=True), source="frontend-1")
    run.send(request("own", PROMPT, max_new_tokens=3, ignore_eos=True))
    for rid in ("late", "late.3"):
        run.send(request(rid, PROMPT, max_new_tokens=3, ignore_eos=True))
        assert run.finishes[rid, 0] == FinishReason(FinishType.ABORT, message="told", user_requested=True)
    run.run()
    assert run.finishes["own", 0].type is FinishType.LENGTH
    run.send(request("late.4", PROMPT, attempt=1, max_new_tokens=3, ignore_eos=True, resume=[Resume(0)]))
    assert run.finishes["late.4", 0].user_requested
    run.assert_empty()


def test_an_abort_that_was_asked_for_ends_requests_of_any_frontend() -> None:
    run = driver()
    for rid in ("a", "a.1", "ab"):
        run.send(request(rid, PROMPT, max_new_tokens=30, ignore_eos=True))
    run.step()
    run.send(AbortReq(rid="a", reason="theirs"), source="frontend-1")
    assert len(held(run)) == 3
    run.send(AbortReq(rid="a", reason="told", user_requested=True), source="frontend-1")
    assert held(run) == [("ab", 0, 0)]
    run.step()
    assert run.finishes["a", 0] == FinishReason(FinishType.ABORT, message="told", user_requested=True)
    assert run.finishes["a.1", 0].user_requested
    run.send(AbortReq(rid="", user_requested=True), source="frontend-1")
    assert held(run) == []
