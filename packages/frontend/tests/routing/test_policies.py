"""Routing policies."""

import random
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from tercet.frontend.routing.peers import PeerRegistry, SchedulerPeer
from tercet.frontend.routing.policies import (
    BALANCE_ABS_THRESHOLD,
    POLICIES,
    ByContent,
    CacheAware,
    LeastLoaded,
    PowerOfTwo,
    RoundRobin,
    RoutingPolicy,
)
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import Load, ModelLimits, Phase, Role, pack_ints

LIMITS = ModelLimits(model="m", context_length=4096, vocab_size=100, max_total_tokens=1000)


@dataclass(frozen=True)
class Prompt:
    """Minimal request for policies."""

    ids: tuple[int, ...]
    salt: str = ""
    content: bytes = b""

    @property
    def prompt_ids(self) -> bytes:
        return pack_ints(self.ids)

    @property
    def prompt_tokens(self) -> int:
        return len(self.ids)


def peers(*tokens: int) -> list[SchedulerPeer]:
    """Create schedulers with these numbers of tokens."""
    made = [SchedulerPeer(f"s{number}", "1", limits=LIMITS) for number in range(len(tokens))]
    for peer, count in zip(made, tokens, strict=True):
        peer.heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=count))
    return made


def first(policy: RoutingPolicy, prompt: Prompt, schedulers: list[SchedulerPeer], *, send: bool = True) -> str:
    chosen = policy.order(prompt, schedulers)[0]
    if send:
        policy.on_dispatched(prompt, chosen)
    return chosen.peer


A, B = Prompt(tuple(range(100))), Prompt(tuple(range(100, 200)))


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_policy_orders_every_scheduler(name: str, count: int) -> None:
    policy, schedulers = POLICIES[name](), peers(*range(count))
    for prompt in (A, B, A, Prompt(())):
        order = policy.order(prompt, schedulers)
        assert sorted(each.peer for each in order) == [each.peer for each in schedulers]
        policy.on_dispatched(prompt, order[0])
    policy.on_peer_down("s0")
    policy.on_peer_down("nobody")
    assert len(policy.order(A, schedulers)) == count


def test_least_loaded_counts_what_came_and_ended_since_the_heartbeat() -> None:
    registry = PeerRegistry()
    for peer in ("s0", "s1"):
        registry.add(peer, Role.SCHEDULER, "1")
        registry.heartbeat(peer, Heartbeat(phase=Phase.IDLE))
    schedulers = list(registry.schedulers.values())
    chosen = []
    for _ in range(6):
        best = LeastLoaded().order(A, schedulers)[0]
        best.own_tokens += 100
        chosen.append(best.peer)
    assert sorted(chosen) == ["s0"] * 3 + ["s1"] * 3
    assert schedulers[0].tokens == 300
    told = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=50, queued_tokens=7))
    registry.heartbeat("s0", told)
    assert schedulers[0].tokens == 300  # the heartbeat describes the time before they arrived
    schedulers[0].own_tokens -= 250
    assert schedulers[0].tokens == 50
    registry.heartbeat("s0", told)
    assert schedulers[0].tokens == 57
    schedulers[0].own_tokens += 100
    assert schedulers[0].tokens == 157


def test_power_of_two_never_takes_the_heaviest_of_many_but_spreads() -> None:
    policy, schedulers = PowerOfTwo(random.Random(0)), peers(0, 10, 20, 30)
    counts = dict.fromkeys([each.peer for each in schedulers], 0)
    for _ in range(2000):
        counts[first(policy, A, schedulers)] += 1
    assert counts["s3"] == 0
    assert counts["s0"] > counts["s1"] > counts["s2"] > 200


def test_a_prompt_goes_where_its_beginning_went() -> None:
    policy, schedulers = CacheAware(), peers(0, 0, 0)
    for place, prompt in enumerate((A, B)):
        policy.on_dispatched(prompt, schedulers[place])
    for number in range(5):
        assert first(policy, Prompt((*A.ids, number)), schedulers) == "s0"
        assert first(policy, Prompt((*B.ids, number)), schedulers) == "s1"


def test_new_prompts_fill_every_cache() -> None:
    policy, schedulers = CacheAware(), peers(0, 0, 0, 0)
    start = (1, 2, 3)  # common beginning of all chats of a model
    homes = Counter(first(policy, Prompt((*start, *[number] * 60)), schedulers) for number in range(400))
    assert len(homes) == 4
    assert min(homes.values()) > 60


def test_policies_that_do_not_know_each_other_choose_the_same_scheduler() -> None:
    system = tuple(range(1000, 1064))
    here, there, schedulers = CacheAware(), CacheAware(), peers(0, 0, 0, 0)
    for number in range(20):
        chat = (*system, *[number] * 60)
        for policy in (here, there):
            for peer in schedulers:
                policy.on_dispatched(Prompt(system), peer)
        assert first(here, Prompt(chat), schedulers) == first(there, Prompt((*chat, 7, 7, 7)), schedulers)


def test_equal_matches_of_almost_whole_prompts_are_sorted_by_load() -> None:
    policy, schedulers = CacheAware(), peers(3, 1, 2)
    for peer in schedulers:
        policy.on_dispatched(A, peer)
    order = policy.order(Prompt((*A.ids, 1, 2, 3)), schedulers)
    assert [each.peer for each in order] == ["s1", "s2", "s0"]


def test_an_idle_scheduler_takes_chats_with_a_common_beginning() -> None:
    policy, schedulers = CacheAware(), peers(400, 0)
    policy.on_dispatched(A, schedulers[0])
    chat = Prompt((*A.ids, *[7] * 50))
    assert first(policy, chat, schedulers, send=False) == "s0", "computing the beginning again costs more"
    schedulers[0].heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=401))
    assert first(policy, chat, schedulers, send=False) == "s1"
    schedulers[1].heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=1))
    assert first(policy, chat, schedulers, send=False) == "s0", "no scheduler is idle"


def test_another_salt_is_another_prompt() -> None:
    policy, schedulers = CacheAware(), peers(0, 0, 0, 0)
    homes = {first(policy, Prompt(A.ids, f"tenant {number}"), schedulers) for number in range(40)}
    assert homes == {"s0", "s1", "s2", "s3"}


def test_an_overloaded_scheduler_is_spared_and_another_caches_the_prompt() -> None:
    policy, schedulers = CacheAware(), peers(0, 0)
    home = first(policy, A, schedulers)
    busy, free = sorted(schedulers, key=lambda each: each.peer != home)
    free.heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=1))
    busy.heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=BALANCE_ABS_THRESHOLD + 1))
    assert first(policy, A, schedulers, send=False) == home
    busy.heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=BALANCE_ABS_THRESHOLD + 2))
    assert first(policy, A, schedulers) == free.peer
    busy.heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=100))
    assert first(policy, A, schedulers) == free.peer  # both caches have it now, and this one is less loaded


def test_nobody_waits_for_a_slot_while_another_has_some() -> None:
    """Short prompts with a common prefix would otherwise all wait at one scheduler."""
    policy, schedulers = CacheAware(), peers(0, 0)
    home = first(policy, A, schedulers)
    busy, free = sorted(schedulers, key=lambda each: each.peer != home)

    def tell(part: SchedulerPeer, queued: int, slots_free: int) -> None:
        tokens = 100 * (9 - slots_free)
        load = Load(queued=queued, running_tokens=tokens, slots_total=8, slots_free=slots_free)
        part.heartbeat = Heartbeat(phase=Phase.STEP, load=load)

    tell(free, 0, 8)
    tell(busy, 2, 1)  # it waits there for a step only
    assert first(policy, A, schedulers, send=False) == home
    tell(busy, 0, 0)
    assert first(policy, A, schedulers, send=False) == home
    tell(busy, 1, 0)
    assert first(policy, A, schedulers, send=False) == free.peer
    tell(free, 1, 2)
    assert first(policy, A, schedulers, send=False) == home
    tell(free, 0, 0)
    assert first(policy, A, schedulers, send=False) == home


def test_many_tokens_more_are_no_reason_while_they_are_few_times_as_many() -> None:
    policy, schedulers = CacheAware(), peers(0, 0)
    home = first(policy, A, schedulers)
    for each in schedulers:
        extra = 10_000 if each.peer == home else 0
        each.heartbeat = Heartbeat(phase=Phase.STEP, load=Load(running_tokens=40_000 + extra))
    assert first(policy, A, schedulers) == home


def test_a_scheduler_that_went_down_has_forgotten() -> None:
    policy, schedulers = CacheAware(), peers(0, 0)
    home = first(policy, A, schedulers)
    policy.on_peer_down(home)
    other = next(each.peer for each in schedulers if each.peer != home)
    policy.on_dispatched(A, next(each for each in schedulers if each.peer == other))
    assert first(policy, A, schedulers) == other


def test_round_robin_starts_anywhere() -> None:
    policy = RoundRobin()
    assert [policy.order(A, peers(0, 0))[0].peer for _ in range(4)] == ["s0", "s1", "s0", "s1"]


def test_equal_images_of_a_namespace_go_to_one_encoder_unless_it_is_busy() -> None:
    policy = ByContent()
    images = [Prompt((1,) * 50, content=bytes([number])) for number in range(20)]
    homes = [first(policy, each, peers(0, 0, 0)) for each in images]
    assert set(homes) == {"s0", "s1", "s2"}
    assert [first(ByContent(), each, peers(9, 200, 0)) for each in images] == homes, "other frontends agree"
    assert {first(policy, replace(images[0], salt=str(salt)), peers(0, 0, 0)) for salt in range(20)} == set(homes)
    remaining = [home for home in homes if home != "s0"]
    kept = [first(policy, each, peers(0, 0, 0)[1:]) for each, home in zip(images, homes, strict=True) if home != "s0"]
    assert kept == remaining, "the death of one moves the images of no other"
    for each, home in zip(images, homes, strict=True):
        loads = [201 * (f"s{number}" == home) for number in range(3)]
        assert first(policy, each, peers(*loads)) != home
    assert first(policy, A, peers(5, 3, 9)) == "s1", "inputs of text go by load"
