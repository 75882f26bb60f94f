"""No tenant holds all slots and pages: the first request of another runs at once, under every policy."""

from typing import Any

import pytest

from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.waiting.fair_share import SHARE
from tercet.scheduler.testing import Driver, request, small_capacity

SLOTS = 18


def driver(*, pages: int = 2000, overlap: int = 0, slots: int = SLOTS, **config: Any) -> Driver:
    capacity = small_capacity(pages=pages, slots=slots, context_length=1024)
    return Driver(capacity, CoreConfig(**{"token_budget": 64, **config}), overlap=overlap)


def ask(run: Driver, rid: str, prompt: list[int], tenant: str, tokens: int = 4, **more: Any) -> None:
    run.send(request(rid, prompt, tenant=tenant, max_new_tokens=tokens, ignore_eos=True, **more))


def running(run: Driver, tenant: str) -> int:
    return sum(req.tenant == tenant for req in run.core.planner.running)


def flood(run: Driver, tenant: str, count: int, tokens: int = 40, n: int = 1) -> None:
    for number in range(count // n):
        ask(run, f"{tenant} {number}", [ord(tenant) % 50, number % 50, number // 50], tenant, tokens, n=n)
    for _ in range(12):
        run.step()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("n", [1, 32])
@pytest.mark.parametrize("policy", PolicyName)
def test_the_first_request_of_another_tenant_gets_a_slot_at_once(policy: PolicyName, n: int, overlap: int) -> None:
    run = driver(policy=policy, overlap=overlap)
    flood(run, "a", 64, n=n)
    assert running(run, "a") == 16, "8 of 9"
    ask(run, "late", [9, 1, 2], "b", 2)
    before = len(run.plans)
    while ("late", 0) not in run.finishes:
        run.step()
    assert len(run.plans) - before <= 4 + overlap
    assert running(run, "a") == 16
    run.run()
    run.assert_empty()


def test_a_second_flood_leaves_a_slot_to_a_third_tenant() -> None:
    run = driver()
    for tenant in "abc":
        flood(run, tenant, 30, tokens=50)
        assert running(run, tenant) >= 1
    run.run()
    run.assert_empty()


@pytest.mark.parametrize("policy", PolicyName)
@pytest.mark.parametrize("tenant", ["", "a"])
def test_where_slots_are_few_or_there_are_no_keys_all_are_used(policy: PolicyName, tenant: str) -> None:
    run = driver(policy=policy, slots=SHARE if tenant else SLOTS)
    for number in range(40):
        ask(run, f"r{number}", [7, number], tenant, 12)
    for _ in range(6):
        run.step()
    assert not run.core.memory.free_slots
    run.run()
    run.assert_empty()


@pytest.mark.parametrize("policy", PolicyName)
def test_pages_are_left_to_a_tenant_that_has_none(policy: PolicyName) -> None:
    """Prompts of a flood that find none do not keep it waiting."""
    run = driver(policy=policy, pages=90, reserve=0.0, reserve_floor=0.0, token_budget=512, radix_cache=False)
    for number in range(40):
        ask(run, f"a{number}", [7, number, *range(23)], "a", 8)
    run.step()
    free = run.core.memory.available
    assert free >= 4, "a flood would take all but what is less than a prompt"
    ask(run, "late", [9, 1, 2], "b", 2)
    run.step()
    assert running(run, "b") == 1
    run.run()
    run.assert_empty()


def test_choices_of_a_tenant_at_its_share_are_not_considered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Thousands wait, and each step would sort them."""
    run = driver(policy=PolicyName.LPM)
    flood(run, "a", 40, tokens=60)
    asked: list[int] = []
    order = type(run.core.policy).order

    def watched(self: Any, waiting: list[Any], cache: Any) -> Any:
        asked.append(len(waiting))
        return order(self, waiting, cache)

    monkeypatch.setattr(type(run.core.policy), "order", watched)
    for _ in range(20):
        run.step()
    assert not asked
    ask(run, "late", [9, 1, 2], "b", 2)
    run.step()
    assert asked == [1]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("policy", PolicyName)
def test_a_tenant_short_of_pages_retracts_its_own_choices(policy: PolicyName, overlap: int) -> None:
    run = driver(policy=policy, overlap=overlap, pages=90, reserve=0.0, reserve_floor=0.0, radix_cache=False)
    flood(run, "a", 12, tokens=60)
    ask(run, "small", [9, 1, 2], "b", 30)
    while not run.core.counters.retractions:
        run.step()
    small = next(req for req in run.core.planner.running if req.tenant == "b")
    while ("small", 0) not in run.finishes:
        assert small in run.core.planner.running, "it costs least to compute again, but another has more pages"
        run.step()
    run.run()
    run.assert_empty()


@pytest.mark.parametrize("policy", PolicyName)
def test_a_retracted_choice_keeps_no_other_tenant_waiting(policy: PolicyName) -> None:
    run = driver(policy=policy, pages=90, reserve=0.0, reserve_floor=0.0, radix_cache=False)
    flood(run, "a", 16, tokens=60)
    while not run.core.counters.retractions:
        run.step()
    ask(run, "late", [9, 1, 2], "b", 2)
    before = len(run.plans)
    while ("late", 0) not in run.finishes:
        run.step()
    assert len(run.plans) - before <= 12, "without the shares it waits for the flood"
    run.run()
    run.assert_empty()
