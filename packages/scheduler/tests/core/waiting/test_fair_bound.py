"""The bound of Sheng et al.: how much more one tenant is given than another while both wait, in any stretch of time."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.protocol.tests.extents import extents
from tercet.scheduler.core.config import CoreConfig, PolicyName
from tercet.scheduler.core.waiting.fair_share import FairShare
from tercet.scheduler.testing import Driver, request, small_capacity


class Busy(Driver):
    """Two tenants that always wait, and a third that comes and goes."""

    def __init__(self, seed: int, slots: int, overlap: int, policy: PolicyName = PolicyName.FAIR) -> None:
        capacity = small_capacity(pages=2000, slots=slots, context_length=256)
        super().__init__(capacity, CoreConfig(policy=policy, token_budget=24), overlap=overlap)
        self.chance = random.Random(seed)
        self.longest = {"a": self.chance.randrange(1, 60), "b": self.chance.randrange(1, 60), "c": 30}
        self.most = {"a": self.chance.randrange(1, 20), "b": self.chance.randrange(1, 20), "c": 12}
        self.bound = max(self.longest.values()) + 2 * slots * max(self.most.values())
        """U: a prompt and all the output that can run at a time."""
        self.given = {"a": 0, "b": 0, "c": 0}
        """As a client would count it: prompt tokens that were computed, and tokens that were heard."""
        self.asked = 0
        self.tenants: dict[str, str] = {}
        self.heard: dict[tuple[str, int], int] = {}

    def ask(self, tenant: str, n: int = 1) -> None:
        rid, self.asked = f"{tenant}{self.asked}", self.asked + 1
        self.tenants[rid] = tenant
        prompt = [ord(tenant) % 50, *(self.chance.randrange(3) for _ in range(self.longest[tenant] - 1))]
        prompt = prompt[: self.chance.randrange(1, self.longest[tenant] + 1)]
        output = self.chance.randrange(1, self.most[tenant] + 1)
        self.send(request(rid, prompt, tenant=tenant, max_new_tokens=output, ignore_eos=True, n=n))

    def keep_busy(self) -> None:
        waiting = [req.tenant for req in self.core.waiting]
        for tenant in "ab":
            for _ in range(self.core.capacity.slots + 1 - waiting.count(tenant)):
                self.ask(tenant)
        if self.chance.random() < 0.2:
            self.ask("c", n=self.chance.randrange(1, 4))

    def turn(self) -> None:
        before = len(self.plans)
        self.step()
        for plan in self.plans[before:]:
            firsts = {row.slot: row.start for row in reversed(plan.rows)}
            for init in plan.introduce:
                self.given["abc"[init.tokens[0] - 47]] += init.prompt_tokens - firsts[init.slot]
        for key in list(self.output):
            count = len(self.output[key])
            self.given[self.tenants[key[0]]] += 2 * (count - self.heard.get(key, 0))
            self.heard[key] = count
            if key in self.finishes:
                del self.output[key], self.heard[key]


def drift(world: Busy, turns: int) -> int:
    """The most by which what two tenants were given differs in any stretch of time."""
    differences = [0]
    for _ in range(turns):
        world.keep_busy()
        world.turn()
        differences.append(world.given["a"] - world.given["b"])
    return max(differences) - min(differences)


@extents(4, 40)
@pytest.mark.parametrize("overlap", [0, 1])
def test_two_that_always_wait_are_given_as_much_in_any_stretch_of_time(overlap: int, extent: settings) -> None:
    @extent
    @given(seed=st.integers(0, 2**32), slots=st.integers(1, 6))
    def check(seed: int, slots: int) -> None:
        world = Busy(seed, slots, overlap)
        assert drift(world, 150) <= 2 * world.bound
        assert isinstance(world.core.policy, FairShare)
        accounts = world.core.policy.accounts.by_tenant
        assert abs(accounts["a"].served - accounts["b"].served) <= world.bound
        assert world.core.counters.retractions == 0

    check()


def test_first_come_first_served_gives_more_to_whoever_asks_for_more() -> None:
    """So that the bound means something."""
    shares = {}
    for policy in (PolicyName.FAIR, PolicyName.FCFS):
        world = Busy(3, 3, 0, policy)
        world.longest |= {"a": 50, "b": 5}
        world.most |= {"a": 20, "b": 2}
        world.bound = 50 + 2 * 3 * 20
        shares[policy] = drift(world, 500) / (2 * world.bound)
    assert shares[PolicyName.FAIR] <= 1
    assert shares[PolicyName.FCFS] > 2, shares
