"""Routing policies: the order in which schedulers are tried for a request."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from tercet.frontend.routing.peers import SchedulerPeer
from tercet.frontend.routing.prefix_tree import PrefixTree

BALANCE_ABS_THRESHOLD = 8192
BALANCE_REL_THRESHOLD = 1.5
"""A scheduler is overloaded if it has `BALANCE_ABS_THRESHOLD` more than the least loaded one and
`BALANCE_REL_THRESHOLD` times as many, or if choices wait for a slot there while the least loaded one has free slots."""
CACHE_THRESHOLD = 0.1
"""Minimum share of a prompt that must match a scheduler's prefixes for the cache to decide its routing."""
MAX_TREE_TOKENS = 1 << 22
"""Maximum number of tokens remembered for one scheduler, even if its cache is larger."""


class Routed(Protocol):
    """Properties of a request that policies use."""

    @property
    def prompt_ids(self) -> bytes:
        """Return the prompt's tokens as an int32 buffer."""
        ...

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def salt(self) -> str: ...


class RoutingPolicy(Protocol):
    """Policy that orders the eligible schedulers, best first; later ones are tried if a queue is full."""

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Return all `schedulers` in order of preference; `schedulers` is not empty."""
        ...

    def on_dispatched(self, request: Routed, scheduler: SchedulerPeer) -> None:
        """Record that a request was sent to a scheduler."""
        ...

    def on_peer_down(self, peer: str) -> None:
        """Forget a scheduler that went down."""
        ...


class RoundRobin:
    """Policy that sends each request to the next scheduler."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:  # noqa: ARG002
        start = self._next % len(schedulers)
        self._next += 1
        return [*schedulers[start:], *schedulers[:start]]

    def on_dispatched(self, request: Routed, scheduler: SchedulerPeer) -> None:
        pass

    def on_peer_down(self, peer: str) -> None:
        pass


class LeastLoaded(RoundRobin):
    """Policy that prefers the scheduler with the fewest tokens, by its last heartbeat and what was sent since."""

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Sort by tokens; ties rotate."""
        return sorted(super().order(request, schedulers), key=lambda each: each.tokens)


class PowerOfTwo(RoundRobin):
    """Policy of two random choices: the less loaded wins, so that frontends with equal data do not pick the same."""

    def __init__(self, rng: random.Random | None = None) -> None:
        super().__init__()
        self._random = rng or random.Random()  # noqa: S311 - nothing secret hangs on it

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:  # noqa: ARG002
        """Return the two candidates by load, then the others in random order."""
        drawn = self._random.sample(schedulers, len(schedulers))
        return sorted(drawn[:2], key=lambda each: each.tokens) + drawn[2:]


class CacheAware:
    """Policy that prefers the scheduler with the longest matching prefix, unless it is overloaded.

    A prompt without a match goes to the scheduler with the fewest remembered tokens, which fills all caches evenly.
    """

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()
        self._trees: dict[str, PrefixTree] = {}

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Sort by matching prefix; without a match by remembered tokens; by load if the first is overloaded."""
        by_load = self._least_loaded.order(request, schedulers)
        if len(by_load) == 1:
            return by_load
        found = {each.peer: self._match(each.peer, request) for each in by_load}
        if max(found.values()) < CACHE_THRESHOLD * request.prompt_tokens:
            chosen = sorted(by_load, key=lambda each: self._tree_tokens(each.peer))
        else:
            chosen = sorted(by_load, key=lambda each: -found[each.peer])
        return by_load if _is_overloaded(chosen[0], by_load[0]) else chosen

    def on_dispatched(self, request: Routed, scheduler: SchedulerPeer) -> None:
        """Remember the prompt of the request."""
        tree = self._trees.get(scheduler.peer)
        if tree is None:
            size = scheduler.limits.max_total_tokens if scheduler.limits else 0
            tree = self._trees[scheduler.peer] = PrefixTree(min(size, MAX_TREE_TOKENS))
        tree.insert(request.salt, request.prompt_ids)

    def on_peer_down(self, peer: str) -> None:
        self._trees.pop(peer, None)

    def _match(self, peer: str, request: Routed) -> int:
        tree = self._trees.get(peer)
        return 0 if tree is None else tree.match(request.salt, request.prompt_ids)

    def _tree_tokens(self, peer: str) -> int:
        tree = self._trees.get(peer)
        return 0 if tree is None else tree.tokens


def _is_overloaded(home: SchedulerPeer, least: SchedulerPeer) -> bool:
    """Return whether the least loaded scheduler is the better choice despite its cold cache."""
    waits = home.load.queued and not home.load.slots_free
    if waits and least.load.slots_free and not least.load.queued:
        return True
    return home.tokens > max(least.tokens + BALANCE_ABS_THRESHOLD, BALANCE_REL_THRESHOLD * least.tokens)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "cache_aware": CacheAware,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
