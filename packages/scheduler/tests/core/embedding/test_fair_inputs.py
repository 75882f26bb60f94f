"""Tenants that share an encoder: the one whose inputs had fewest tokens comes next."""

import random
from collections import Counter
from typing import Any

import pytest

from packages.scheduler.tests.core.embedding.embedding_run import Run
from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import pack_ints
from tercet.scheduler.core.config import PolicyName
from tercet.scheduler.core.events import PeerBlocked, PeerDrained
from tercet.scheduler.core.waiting.fair_share import Account, VirtualTokenCounters
from tercet.scheduler.testing import embedding_request


def fair(**config: Any) -> Run:
    return Run(**{"policy": PolicyName.FAIR, "token_budget": 4, **config})


def accounts(run: Run) -> VirtualTokenCounters:
    assert run.core.waiting.accounts is not None
    return run.core.waiting.accounts


def ask(run: Run, rid: str, token: int, count: int, tenant: str, attempt: int = 0) -> None:
    run.send(embedding_request(rid, [token] * count, tenant=tenant, attempt=attempt))


def firsts(plans: list[list[list[int]]]) -> list[list[int]]:
    return [[row[0] for row in plan] for plan in plans]


@pytest.mark.parametrize("policy", [PolicyName.FAIR, PolicyName.FCFS])
def test_an_input_does_not_wait_for_all_that_another_tenant_indexes(policy: PolicyName) -> None:
    run = fair(policy=policy)
    for number in range(100):
        ask(run, f"document {number}", 7, 4, "index")
    run.plan()
    run.commit()
    ask(run, "query", 9, 2, "search")
    place = firsts(run.run()).index([9])
    assert place == (0 if policy is PolicyName.FAIR else 99)


def test_tenants_take_turns_by_tokens_also_within_a_step() -> None:
    run = fair(token_budget=12)
    for number in range(8):
        ask(run, f"a{number}", 7, 4, "a")
    for number in range(12):
        ask(run, f"b{number}", 8, 1, "b")
    assert firsts(run.run()) == [[7, 8, 8, 8, 8, 7], [8, 8, 8, 8, 8, 7, 8, 8, 8], [7, 7, 7], [7, 7]]
    assert {name: each.served for name, each in accounts(run).by_tenant.items()} == {"a": 32, "b": 12}


def test_who_begins_to_wait_is_lifted_to_those_that_wait() -> None:
    run = fair()
    for number in range(9):
        ask(run, f"a{number}", 7, 4, "a")
    for _ in range(4):
        run.plan()
        run.commit()
    for number in range(4):
        ask(run, f"b{number}", 8, 4, "b")
    assert firsts(run.run()) == [[8], [7]] * 4 + [[7]]


@pytest.mark.parametrize("policy", [PolicyName.FAIR, PolicyName.FCFS])
def test_what_comes_back_after_a_crash_takes_turns_too(policy: PolicyName) -> None:
    """Or an input would wait for all that another tenant had asked for before the crash."""
    run = fair(policy=policy)
    ask(run, "query", 9, 4, "search")
    for number in range(8):
        ask(run, f"document {number}", 7, 4, "index", attempt=1)
    place = firsts(run.run()).index([9])
    assert place == (0 if policy is PolicyName.FAIR else 8)


@pytest.mark.parametrize("policy", PolicyName)
def test_one_tenant_leaves_places_for_others(policy: PolicyName) -> None:
    run = fair(max_queued=8, policy=policy)
    for number in range(8):
        ask(run, f"a{number}", 7, 1, "a")
    assert [*run.rejected] == ["a4", "a5", "a6", "a7"]
    assert {(each.code, each.retry) for each in run.rejected.values()} == {("overloaded", True)}
    ask(run, "b", 8, 1, "b")
    ask(run, "back", 7, 1, "a", attempt=1)
    assert len(run.rejected) == 4


@pytest.mark.parametrize("seed", range(8))
def test_what_waits_is_on_its_tenant_s_account_whatever_happens(seed: int) -> None:
    """And whoever always waits is given as much as others who do, but for the longest input and a step."""
    chance = random.Random(seed)
    run, given = fair(token_budget=16, max_queued=400), Counter[str]()
    sent = 0
    for _ in range(300):
        for tenant in "ab":
            while sum(req.tenant == tenant for req in run.core.waiting) < 20:
                sent += 1
                ask(run, f"{tenant}{sent}", ord(tenant) % 50, chance.randrange(1, 17), tenant)
        if chance.random() < 0.2:
            sent += 1
            ask(run, f"c{sent}", ord("c") % 50, chance.randrange(1, 17), "c", attempt=chance.randrange(2))
        if chance.random() < 0.2:
            run.send(AbortReq(rid=chance.choice([rid for _, rid in run.core.roster])))
        if chance.random() < 0.2:
            run.send(PeerBlocked("f0"), PeerDrained("f0"))
        for row in run.plan() or []:
            given["abc"[row[0] - 47]] += len(row)
        run.commit()
        waiting = Counter(req.tenant for req in run.core.waiting)
        for name in {*accounts(run).by_tenant, *waiting}:
            assert accounts(run).by_tenant.get(name, Account()).waiting == waiting[name]
    assert abs(given["a"] - given["b"]) <= 16 + 16
    run.run()
    assert run.core.empty


def test_a_tenant_of_too_long_a_name_is_refused() -> None:
    run = fair()
    run.send(embedding_request("x", [1], tenant="t" * 513))
    assert run.rejected["x"].code == "invalid_request"
    assert "tenant" in run.rejected["x"].message
    assert run.core.empty


def test_a_later_attempt_of_what_waits_changes_nothing() -> None:
    run = fair()
    ask(run, "a", 7, 1, "a")
    ask(run, "a", 7, 1, "a", attempt=1)
    assert accounts(run)["a"].waiting == 1
    run.run()
    assert [*run.vectors] == [("f0", "a", 1)]
    assert run.plans[0].rows[0].input_ids == pack_ints([7])
