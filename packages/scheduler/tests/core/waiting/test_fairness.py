"""Everybody's turn comes: under every policy, when memory is short, and when somebody's peer takes nothing."""

from typing import Any

import pytest

from tercet.protocol.messages.messages import Rejected
from tercet.protocol.messages.values import Grammar, GrammarKind, LogprobParams, Resume
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.events import GrammarPending, GrammarRead, PeerBlocked, PeerDrained
from tercet.scheduler.testing import Driver, request, small_capacity

SLOW = "detokenizer-slow"


def test_no_row_is_empty_when_prefills_take_the_budget() -> None:
    config = CoreConfig(token_budget=4, reserve=0.0, reserve_floor=0.0)
    run = Driver(small_capacity(pages=12, page_size=4, slots=4), config)
    for rid in "ac":
        run.send(request(rid, [ord(rid) % 50] * 2, max_new_tokens=30, ignore_eos=True))
    run.step()
    run.send(request("b", [2] * 32, max_new_tokens=1, ignore_eos=True))
    run.run()
    assert all(row.count >= 1 for plan in run.plans for row in plan.rows)
    assert max(sum(row.count for row in plan.rows) for plan in run.plans) == 4
    run.assert_empty()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("what", ["pages", "slots", "alone"])
def test_blocked_requests_give_way_to_those_whose_peer_listens(what: str, overlap: int) -> None:
    capacity = small_capacity(pages=20, slots=2 if what == "slots" else 8)
    run = Driver(capacity, CoreConfig(token_budget=64), overlap=overlap)
    for rid in "ab":
        run.send(request(rid, [ord(rid) % 50] * 30, max_new_tokens=8, ignore_eos=True, detokenizer=SLOW))
    run.step()
    run.step()
    run.send(PeerBlocked(SLOW))
    run.run()
    wanted = request("c", [3] * 70, max_new_tokens=4, ignore_eos=True, alone=what == "alone")
    run.send(wanted)
    run.run()
    assert run.output["c", 0] == run.answer(wanted, 0)
    assert not {("a", 0), ("b", 0)} & run.finishes.keys()
    run.send(PeerDrained(SLOW))
    run.run()
    assert len(run.output["a", 0]) == len(run.output["b", 0]) == 8
    run.assert_empty()


def test_blocked_requests_keep_their_pages_while_nobody_needs_them() -> None:
    run = Driver(small_capacity(pages=40))
    run.send(request("a", [1] * 30, max_new_tokens=8, ignore_eos=True, detokenizer=SLOW))
    run.step()
    run.step()
    run.send(PeerBlocked(SLOW))
    run.send(request("c", [3] * 30, max_new_tokens=4, ignore_eos=True))
    run.run()
    assert run.core.counters.retractions == 0


@pytest.mark.parametrize("overlap", [0, 1])
def test_nobody_waits_for_a_grammar_but_those_that_follow_it(overlap: int) -> None:
    pending, read = Grammar(GrammarKind.REGEX, "a*"), Grammar(GrammarKind.REGEX, "b*")
    run = Driver(small_capacity(grammars="some 1"), overlap=overlap)
    run.send(request("before", [1] * 5, max_new_tokens=9, ignore_eos=True, grammar=pending))
    run.step()
    run.send(GrammarPending(pending))
    run.send(request("a", [1] * 5, max_new_tokens=4, ignore_eos=True, grammar=pending, n=2))
    run.send(request("b", [2] * 5, max_new_tokens=4, ignore_eos=True, grammar=read))
    run.send(request("c", [3] * 5, max_new_tokens=4, ignore_eos=True))
    run.run()
    assert {rid for rid, _ in run.finishes} == {"before", "b", "c"}
    assert not run.core.runnable
    assert run.core.grammars() == {pending}
    run.send(GrammarRead(pending))
    run.run()
    assert len(run.output["a", 0]) == len(run.output["a", 1]) == 4
    run.assert_empty()


def test_a_request_with_an_invalid_grammar_is_refused_before_it_runs() -> None:
    bad, good = Grammar(GrammarKind.REGEX, "a*"), Grammar(GrammarKind.REGEX, "b*")
    run = Driver(small_capacity(grammars="some 1"))
    run.send(request("begun", [1] * 5, max_new_tokens=9, ignore_eos=True, grammar=bad))
    run.step()
    run.send(GrammarPending(bad))
    run.send(request("a", [1] * 5, max_new_tokens=4, ignore_eos=True, grammar=bad, n=3))
    resumed = request("b", [2] * 5, max_new_tokens=4, ignore_eos=True, grammar=bad, attempt=2, resume=[Resume(0)])
    run.send(resumed)
    run.send(request("c", [3] * 5, max_new_tokens=4, ignore_eos=True, grammar=good))
    run.step()
    run.send(GrammarRead(bad, "it is bad"))
    why, code = "The grammar is refused: it is bad.", "invalid_grammar"
    assert run.rejected == {
        "a": Rejected(rid="a", attempt=0, code=code, message=why, retry=True),
        "b": Rejected(rid="b", attempt=2, code=code, message=why, retry=True),
    }
    run.run()
    assert {rid for rid, _ in run.finishes} == {"begun", "c"}
    run.assert_empty()


def roomy(**options: Any) -> Driver:
    """Room for prompts that take many steps of 16 tokens."""
    config = CoreConfig(**{"token_budget": 16, **options})
    return Driver(small_capacity(pages=256, page_size=4, slots=8, context_length=1024), config)


def computed(run: Driver, slot: int) -> list[int]:
    """Tokens of a slot in each plan that names it."""
    return [row.count for plan in run.plans for row in plan.rows if row.slot == slot]


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("lengths", [[400], [400, 190, 80]])
@pytest.mark.parametrize("logprobs", [None, LogprobParams(prompt=True)])
def test_a_short_prompt_does_not_wait_for_long_ones(
    policy: PolicyName, lengths: list[int], logprobs: LogprobParams | None
) -> None:
    run = roomy(policy=policy)
    wanted = {f"long {length}": request(f"long {length}", [length % 50] * length, priority=9) for length in lengths}
    for message in wanted.values():
        run.send(message)
        run.step()
    wanted["short"] = request("short", [7, 8, 9, 10], max_new_tokens=2, ignore_eos=True, logprobs=logprobs)
    run.send(wanted["short"])
    for _ in range(4):
        run.step()
    assert len(run.output["short", 0]) == 2
    assert ("short", 0) in run.finishes
    run.run()
    assert all(run.output[rid, 0] == run.answer(message) for rid, message in wanted.items())
    if logprobs is not None:
        assert len(run.prompt_logprobs["short", 0]) == 4
    run.assert_empty()


def test_a_long_prompt_gets_half_of_each_step_and_the_remainder() -> None:
    run = roomy()
    run.send(request("long", [1] * 400, max_new_tokens=1, logprobs=LogprobParams(prompt=True)))
    run.step()
    slot = run.plans[0].introduce[0].slot
    for number in range(20):
        run.send(*(request(f"s{number}.{other}", [number + 2, other, 5, 5], max_new_tokens=1) for other in range(5)))
        run.step()
    assert computed(run, slot) == [16] + [8] * 20
    run.run()
    assert all(sum(row.count for row in plan.rows) == 16 for plan in run.plans[:-1])
    assert all(len({row.slot for row in plan.rows}) == len(plan.rows) for plan in run.plans)
    assert len(run.prompt_logprobs["long", 0]) == 400
    assert len(run.finishes) == 101


@pytest.mark.parametrize("arrive", ["together", "later"])
def test_prompts_that_begin_alike_are_computed_one_after_another(arrive: str) -> None:
    """Beside each other they would each compute what is the same in all of them."""
    run = roomy()
    for number in range(4):
        run.send(request(f"r{number}", [*[1] * 191, 10 + number], max_new_tokens=1))
        if arrive == "later":
            run.step()
    run.run()
    assert sum(row.count for plan in run.plans for row in plan.rows) == 192 + 3 * 4
    assert all(sum(row.count for row in plan.rows) == 16 for plan in run.plans[:12])
    assert len(run.finishes) == 4


def test_who_has_much_of_its_prompt_in_the_cache_is_short() -> None:
    run = roomy()
    run.send(request("warm", [3] * 200, max_new_tokens=1))
    run.run()
    run.send(request("long", [1] * 160, max_new_tokens=1))
    run.step()
    run.send(request("known", [*[3] * 200, 4], max_new_tokens=1))
    run.step()
    assert ("known", 0) in run.finishes


def test_however_few_tokens_a_step_has_left_each_gets_one() -> None:
    run = roomy(token_budget=8)
    for number in range(4):
        run.send(request(f"decode {number}", [number], max_new_tokens=150, ignore_eos=True))
    run.step()
    for length in (200, 90, 40, 4):
        run.send(request(f"prompt {length}", [length % 50] * length, max_new_tokens=1))
        run.step()
    for _ in range(3):
        run.step()
    assert ("prompt 4", 0) in run.finishes
    run.run()
    assert len(run.finishes) == 8


@pytest.mark.parametrize("policy", PolicyName)
def test_a_passed_over_request_gets_its_turn(policy: PolicyName) -> None:
    """Better placed requests keep coming: with cached prompts, and of higher priority."""
    run = Driver(small_capacity(slots=1), CoreConfig(policy=policy, max_skips=8))
    run.send(request("warm", [5] * 20, max_new_tokens=1, ignore_eos=True))
    run.run()
    run.send(request("x0", [5] * 20, max_new_tokens=1, ignore_eos=True, priority=9))
    run.send(request("poor", [4] * 3, max_new_tokens=1, ignore_eos=True))
    for number in range(1, 40):
        run.send(request(f"x{number}", [5] * 20, max_new_tokens=1, ignore_eos=True, priority=9))
        run.step()
        if ("poor", 0) in run.finishes:
            break
    assert number <= 12


def test_a_retracted_request_goes_first_however_many_better_ones_come() -> None:
    """Longer requests of higher priority keep coming, so that the short one always costs least to retract."""
    config = CoreConfig(policy=PolicyName.PRIORITY, token_budget=64, reserve=0.0, reserve_floor=0.0, radix_cache=False)
    run = Driver(small_capacity(pages=16, page_size=4, slots=4), config)
    run.send(request("poor", [4] * 3, max_new_tokens=40, ignore_eos=True))
    for number in range(70):
        if run.core.roster.queued < 3:
            run.send(request(f"x{number}", [5] * 12, max_new_tokens=20, ignore_eos=True, priority=9))
        run.step()
    assert ("poor", 0) in run.finishes
    assert run.core.counters.retractions > 0


def test_a_prompt_half_computed_waits_for_a_blocked_peer_too() -> None:
    run = Driver(small_capacity(), CoreConfig(token_budget=8))
    run.send(request("a", [1] * 20, max_new_tokens=2, ignore_eos=True))
    run.step()
    run.send(PeerBlocked("detokenizer-0"))
    assert run.core.schedule() is None


@pytest.mark.parametrize("hold", [True, False])
def test_an_exclusive_request_of_a_full_frontend_blocks_no_others(hold: bool) -> None:
    run = Driver(small_capacity())
    suspect = {"alone": True, "resume": [Resume(0)], "detokenizer": SLOW, "ignore_eos": True}
    run.send(request("suspect", [5, 5], attempt=2, hold=True, **suspect))  # type: ignore[arg-type]
    assert len(run.others) == 1  # it was told that nothing else runs
    run.send(PeerBlocked(SLOW))
    if not hold:
        run.send(request("suspect", [5, 5], attempt=3, **suspect))  # type: ignore[arg-type]
    run.send(request("b", [6], ignore_eos=True))
    run.step()
    run.step()
    assert len(run.output["b", 0]) == 2
    run.send(PeerDrained(SLOW), request("suspect", [5, 5], attempt=4, **suspect))  # type: ignore[arg-type]
    run.run()
    assert list(run.finishes) == [("b", 0), ("suspect", 0)]
    assert max(len(plan.rows) for plan in run.plans) == 1
