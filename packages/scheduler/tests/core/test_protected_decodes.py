"""Prompts of one tenant lengthen the steps of another tenant's decodes by a bounded number of tokens."""

from collections import Counter

import pytest

from tercet.protocol.messages.values import LogprobParams
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.events import PeerBlocked
from tercet.scheduler.core.plan import Plan
from tercet.scheduler.core.plan_builder import SCORED_TOKEN, TenantShare
from tercet.scheduler.testing import Driver, request, small_capacity
from tercet.scheduler.testing.driver import DETOKENIZER

BUDGET = 64
PROTECTION = CoreConfig().protection
PROMPT = [number % 50 for number in range(400)]


def driver(policy: PolicyName = PolicyName.FCFS) -> Driver:
    capacity = small_capacity(pages=2000, slots=16, context_length=1024)
    return Driver(capacity, CoreConfig(token_budget=BUDGET, policy=policy, radix_cache=False))


def start_decode(run: Driver, tenant: str) -> None:
    run.send(request("stream", [1, 2, 3], tenant=tenant, max_new_tokens=400, ignore_eos=True))
    run.step()
    run.step()


def steps_until(run: Driver, rid: str) -> list[Plan]:
    """Run until a request ends, and return the plans of that time."""
    before = len(run.plans)
    while (rid, 0) not in run.finishes:
        run.step()
    return run.plans[before:]


def prompt_tokens(plan: Plan) -> int:
    return sum(row.count for row in plan.rows) - 1


@pytest.mark.parametrize("policy", PolicyName)
def test_prompts_of_another_tenant_get_their_share_of_a_step(policy: PolicyName) -> None:
    run = driver(policy)
    start_decode(run, "a")
    for number in range(3):
        run.send(request(f"long {number}", PROMPT, tenant="b", max_new_tokens=1, ignore_eos=True))
    plans = steps_until(run, "long 0")
    share = BUDGET // PROTECTION
    assert max(map(prompt_tokens, plans)) <= share + 1, "one of each step is admitted without a share"
    assert min(map(prompt_tokens, plans[1:-1])) >= share, "the share is used"


def test_a_third_tenant_has_a_share_of_its_own() -> None:
    run = driver()
    start_decode(run, "a")
    run.send(request("long", PROMPT, tenant="b", max_new_tokens=1, ignore_eos=True))
    run.step()
    run.send(request("short", [7] * (BUDGET // PROTECTION), tenant="c", max_new_tokens=1, ignore_eos=True))
    assert len(steps_until(run, "short")) <= 2


@pytest.mark.parametrize("tenant", ["a", ""])
def test_prompts_of_the_same_tenant_fill_the_budget(tenant: str) -> None:
    run = driver()
    start_decode(run, tenant)
    run.send(request("long", PROMPT, tenant=tenant, max_new_tokens=1, ignore_eos=True))
    assert max(map(prompt_tokens, steps_until(run, "long"))) == BUDGET - 1


def test_prompts_alone_fill_the_budget() -> None:
    run = driver()
    run.send(request("long", PROMPT, tenant="b", max_new_tokens=1, ignore_eos=True))
    assert max(map(prompt_tokens, steps_until(run, "long"))) + 1 == BUDGET


def test_scored_prompt_tokens_cost_more_of_the_share() -> None:
    run = driver()
    start_decode(run, "a")
    scores = LogprobParams(top=20, prompt=True)
    run.send(request("scored", PROMPT, tenant="b", max_new_tokens=1, ignore_eos=True, logprobs=scores))
    plans = steps_until(run, "scored")
    assert max(map(prompt_tokens, plans)) == BUDGET // PROTECTION // SCORED_TOKEN


def start_many(run: Driver, tenant: str, count: int) -> None:
    run.send(request(f"many {tenant}", [4, 5], tenant=tenant, n=count, max_new_tokens=90, ignore_eos=True))
    for _ in range(4):
        run.step()


def decodes(run: Driver, steps: int) -> list[Counter[str]]:
    """Run some steps and return the rows of each request in each of them."""
    found = []
    for _ in range(steps):
        plan = run.core.schedule()
        assert plan is not None
        found.append(Counter(req.rid for req in run.core.in_flight[-1][1]))
        run._take(run.core.commit(run.executor.submit(plan).result()))
    return found


def test_many_choices_of_another_tenant_take_turns() -> None:
    run = driver()
    start_decode(run, "a")
    start_many(run, "b", 12)
    before = {key: len(tokens) for key, tokens in run.output.items()}
    share = TenantShare.of(BUDGET // PROTECTION).of_decodes
    assert decodes(run, 30) == [Counter({"stream": 1, "many b": share})] * 30
    grown = {key: len(tokens) - before[key] for key, tokens in run.output.items()}
    assert grown.pop(("stream", 0)) == 30
    assert sum(grown.values()) == 30 * share
    assert max(grown.values()) - min(grown.values()) <= 2
    run.run()
    run.assert_empty()


def test_decodes_and_prompts_of_a_tenant_share_its_tokens() -> None:
    """And neither ends the other: decodes leave a part to prompts, and admissions wait for it."""
    run = driver()
    start_decode(run, "a")
    start_many(run, "b", 6)
    for number in range(3):
        run.send(request(f"long {number}", PROMPT[: 20 * number + 20], tenant="b", max_new_tokens=1, ignore_eos=True))
    share = BUDGET // PROTECTION
    plans = steps_until(run, "long 2")
    assert {prompt_tokens(plan) - len(plan.introduce) for plan in plans[1:-1]} <= {share - 1, share}
    assert {prompt_tokens(plan) for plan in plans[1:-1]} <= {share, share + 1}
    run.run()
    run.assert_empty()


def test_admissions_of_a_tenant_wait_for_its_share() -> None:
    run = driver()
    start_decode(run, "a")
    for number in range(12):
        run.send(request(f"short {number}", [number], tenant="b", max_new_tokens=1, ignore_eos=True))
    plans = steps_until(run, "short 11")
    assert [len(plan.introduce) for plan in plans if plan.introduce] == [8, 4]


def test_no_choice_sits_out_where_it_helps_no_tenant() -> None:
    run = driver()
    start_many(run, "b", 12)
    assert decodes(run, 1) == [Counter({"many b": 12})]
    run = Driver(small_capacity(pages=2000, slots=40, context_length=1024), CoreConfig(token_budget=BUDGET))
    start_many(run, "a", 10)
    start_many(run, "b", 12)
    assert decodes(run, 1) == [Counter({"many a": 10, "many b": 12})]


def test_blocked_choices_take_no_turns() -> None:
    """Those that can go on would wait for their turn for as long as the peer of the others is blocked."""
    run = driver()
    start_decode(run, "a")
    start_many(run, "b", 8)
    run.send(request("other", [9], tenant="b", max_new_tokens=20, ignore_eos=True, detokenizer="detokenizer-1"))
    run.step()
    run.step()
    run.send(PeerBlocked(DETOKENIZER))
    assert decodes(run, 3) == [Counter({"other": 1})] * 3
