"""Pages shared, copied, given up and taken again: the fake executor raises where a wrong one would be read."""

import pytest

from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import Resume, pack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import StepResult
from tercet.scheduler.testing import Driver, request, small_capacity

PROMPT = [7, 3, 9, 4, 1, 8, 2, 6, 5, 3, 3]


def driver(**options: int) -> Driver:
    """No prefix cache, so that pages are shared among choices alone."""
    capacity = small_capacity(pages=options.pop("pages", 64), slots=options.pop("slots", 8))
    return Driver(capacity, CoreConfig(radix_cache=False, reserve=0.0, reserve_floor=0.0, **options))  # type: ignore[arg-type]


def test_a_leader_that_recomputes_shares_no_pages_before_it_is_done() -> None:
    run = driver(token_budget=7, slots=4)
    wanted = request("a", PROMPT, n=2, max_new_tokens=4, ignore_eos=True)
    run.send(wanted)
    for _ in range(2):
        run.step()
    assert len(run.core.waiting) == 1
    leader = next(iter(run.core.planner.running))
    assert leader.published
    run.core.planner.retract(leader)
    run.core.memory.pools.groups[0].free_pages.reverse()  # it gets other pages, that hold nothing yet
    run.run()
    assert [run.output["a", index] for index in (0, 1)] == [run.answer(wanted, index) for index in (0, 1)]


def test_choices_that_go_on_share_their_prompt_and_nothing_after_it() -> None:
    run = driver(token_budget=64)
    wanted = request("a", PROMPT, n=2, max_new_tokens=8, ignore_eos=True)
    answers = [run.answer(wanted, index) for index in (0, 1)]
    resume = [Resume(index, pack_ints(answers[index][:3])) for index in (0, 1)]
    for index in (0, 1):
        run.output["a", index] = answers[index][:3]
    run.send(request("a", PROMPT, n=2, max_new_tokens=8, ignore_eos=True, attempt=1, resume=resume))
    run.run()
    assert run.core.counters.forks == 1
    assert [run.output["a", index] for index in (0, 1)] == answers


def test_a_page_given_in_the_step_that_retracts_another_reaches_its_table() -> None:
    run = driver(pages=4, slots=4, token_budget=16)
    wanted = [request(rid, [ord(rid) % 50] * 3, max_new_tokens=4, ignore_eos=True) for rid in "abc"]
    run.send(*wanted)
    run.run()
    assert run.core.counters.retractions == 1
    assert [run.output[each.rid, 0] for each in wanted] == [run.answer(each, 0) for each in wanted]
    run.assert_empty()


@pytest.mark.parametrize(("token", "shared"), [(3, len(PROMPT) // 4), (-1, 0)])
def test_an_abort_in_flight_leaves_what_gave_a_token_and_nothing_else(token: int, shared: int) -> None:
    run = Driver(small_capacity(), CoreConfig(token_budget=16))
    run.send(request("a", PROMPT))
    assert run.core.schedule() is not None
    run.send(AbortReq(rid="a"))
    run.core.commit(StepResult(step=0, token_ids=[token]))
    assert run.core.memory.cache.measure("/", pack_ints(PROMPT)) == shared
    run.assert_empty()
