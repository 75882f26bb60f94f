"""A tenant within its share of the pages gets them at once, even if another holds all, which loses little by that."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tercet.protocol.messages.values import unpack_ints
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.retraction import REGROWTH
from tercet.scheduler.testing import Driver, request, small_capacity

PAGES, PAGE = 90, 4


class Shared(Driver):
    """A scheduler whose pages a tenant fills."""

    def __init__(self, *, overlap: int = 0, slots: int = 40, **config: Any) -> None:
        capacity = small_capacity(pages=PAGES, page_size=PAGE, slots=slots, context_length=1024)
        settings = {"token_budget": 64, "reserve": 0.0, "reserve_floor": 0.0, **config}
        super().__init__(capacity, CoreConfig(**settings), overlap=overlap)
        self.sent: dict[str, Any] = {}

    def ask(self, rid: str, tenant: str, prompt: list[int], tokens: int, **more: Any) -> None:
        self.sent[rid] = request(rid, prompt, tenant=tenant, max_new_tokens=tokens, ignore_eos=True, **more)
        self.send(self.sent[rid])

    def flood(self, count: int = 30, tokens: int = 60, **more: Any) -> None:
        """Let requests of a tenant take all pages."""
        for number in range(count):
            self.ask(f"a{number}", "a", [5, number, 7], tokens, **more)
        self.step()
        while self.core.memory.available > 1:
            assert self.step()

    def computed(self, first: int) -> int:
        """Return the tokens that were computed for requests whose prompt begins with a token."""
        firsts: dict[int, int] = {}
        computed = 0
        for plan in self.plans:
            firsts |= {init.slot: unpack_ints(init.tokens)[0] for init in plan.introduce}
            computed += sum(row.count for row in plan.rows if firsts[row.slot] == first)
        return computed

    def steps_until(self, rid: str) -> int:
        before = len(self.plans)
        while (rid, 0) not in self.finishes:
            assert self.step()
        return len(self.plans) - before

    def finish(self) -> None:
        """Run to the end; every answer is the one that it is without other requests."""
        self.run()
        self.assert_empty()
        for rid, wanted in self.sent.items():
            for index in range(wanted.sampling.n):
                assert self.output[rid, index] == self.answer(wanted, index)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("policy", PolicyName)
def test_a_newcomer_takes_pages_from_the_tenant_that_holds_all(policy: PolicyName, overlap: int) -> None:
    run = Shared(policy=policy, overlap=overlap)
    run.flood()
    run.ask("hi", "b", [9, 1, 2, 3, 4, 5], 1)
    assert run.steps_until("hi") <= 3 + overlap
    run.finish()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("policy", PolicyName)
def test_a_tenant_within_its_share_is_not_held_up(policy: PolicyName, overlap: int) -> None:
    """Its stream gets a token each step, and its second request starts at once, even if the flood has more priority."""
    run = Shared(policy=policy, overlap=overlap)
    run.ask("stream", "b", [9, 1, 2], 90)
    run.flood(priority=5)
    for number in range(8):
        run.ask(f"hi {number}", "b", [9, number, 2, 3, 4, 5], 1)
        before, plans = len(run.output["stream", 0]), len(run.plans)
        assert run.steps_until(f"hi {number}") <= 3 + overlap
        assert len(run.output["stream", 0]) - before >= len(run.plans) - plans - 1 - overlap
    run.finish()


def test_the_newest_choices_yield() -> None:
    run = Shared()
    run.flood()
    running = sorted(run.core.planner.running, key=lambda req: req.arrival)
    run.ask("hi", "b", [9, 1, 2], 1)
    run.steps_until("hi")
    yielded = [req for req in running if req.yielded]
    assert 0 < len(yielded) < 4
    assert yielded == running[-len(yielded) :]
    run.finish()


def test_prompts_that_have_computed_little_yield_again() -> None:
    """The oldest prompt takes the whole share of a step, and the others only hold pages, and do not grow."""
    run = Shared(radix_cache=False)
    run.ask("stream", "b", [9, 1, 2], 70)
    run.step()
    for number in range(6):
        run.ask(f"a{number}", "a", [5, number] * 45, 1)
    run.step()
    for number in range(12):
        run.ask(f"hi {number}", "b", [9, number, 2, 3, 4, 5] * 3, 1)
        assert run.steps_until(f"hi {number}") <= 6
    run.finish()


def test_a_tenant_takes_no_more_than_its_share() -> None:
    run = Shared()
    run.flood()
    run.ask("long", "b", [9] * (PAGE * PAGES // 2 + 1), 1)
    for _ in range(20):
        run.step()
    assert not any(req.yielded for req in run.core.roster)
    run.finish()


def test_tenants_that_share_pages_count_them_once() -> None:
    """Each of its choices names the pages of the prompt, but they are there once: it is not the one to yield."""
    run = Shared()
    run.ask("many", "c", [8] * 40, 8, n=10)
    for _ in range(3):
        run.step()
    run.flood(count=40)
    run.ask("hi", "b", [9, 1, 2], 1)
    run.steps_until("hi")
    assert not any(req.yielded for req in run.core.roster if req.tenant == "c")
    run.finish()


@pytest.mark.parametrize("overlap", [0, 1])
@given(seed=st.integers(0, 2**32), policy=st.sampled_from(PolicyName), radix=st.booleans(), giant=st.booleans())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_newcomers_without_end_cost_a_bounded_amount(
    overlap: int, seed: int, policy: PolicyName, radix: bool, giant: bool
) -> None:
    """However many come, each answer of the other tenant ends, and what it computes again is bounded."""
    chance = random.Random(seed)
    run = Shared(overlap=overlap, policy=policy, radix_cache=radix)
    if giant:
        run.ask("a0", "a", [5] * 250, 100)
    else:
        for number in range(chance.randrange(8, 30)):
            run.ask(f"a{number}", "a", [5, number], chance.randrange(20, 80))
    others = list(run.sent)
    while not all((rid, 0) in run.finishes for rid in others):
        if not any(req.tenant == "b" for req in run.core.roster):
            prompt = [9, *(chance.randrange(1, 50) for _ in range(chance.randrange(40)))]
            run.ask(f"b{len(run.sent)}", "b", prompt, chance.randrange(1, 20))
        for _ in range(chance.randrange(1, 5)):
            run.step()
        assert len(run.plans) < 4000
    run.finish()
    if giant:
        assert run.computed(5) <= (REGROWTH + 2) * 350
