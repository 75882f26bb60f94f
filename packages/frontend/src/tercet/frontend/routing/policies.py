"""How requests are spread over schedulers: the policies to choose from."""

import random
from collections.abc import Callable, Sequence
from typing import Protocol

from tercet.frontend.routing.peers import SchedulerPeer
from tercet.frontend.routing.prefix_tree import PrefixTree

UNEVEN_TOKENS = 8192
UNEVEN_RATIO = 1.5
"""A scheduler has too much to do when it has `UNEVEN_TOKENS` more than the least loaded one and `UNEVEN_RATIO` times
as many, or when choices wait for a slot there while the least loaded one has free slots."""
WORTHWHILE = 0.1
"""Share of a prompt that some scheduler must have been sent before, for its cache to decide where the prompt goes."""
MOST_REMEMBERED = 1 << 22
"""Tokens remembered of each scheduler, whatever the size of its cache."""


class Routed(Protocol):
    """What a policy knows of a request."""

    @property
    def prompt_ids(self) -> bytes:
        """The prompt's tokens, an int32 buffer."""
        ...

    @property
    def prompt_tokens(self) -> int: ...  # noqa: D102
    @property
    def salt(self) -> str: ...  # noqa: D102


class RoutingPolicy(Protocol):
    """Orders the schedulers that can take a request, the best first. Later ones are tried when a queue is full."""

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """All of `schedulers`, which is never empty."""
        ...

    def sent(self, request: Routed, scheduler: SchedulerPeer) -> None:
        """A request was sent to a scheduler."""
        ...

    def gone(self, peer: str) -> None:
        """A scheduler went down, and its cache with it."""
        ...


class RoundRobin:
    """Each request to the next scheduler."""

    def __init__(self) -> None:
        self._next = 0

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:  # noqa: ARG002
        """The same order for every request, turned by one each time."""
        start = self._next % len(schedulers)
        self._next += 1
        return [*schedulers[start:], *schedulers[:start]]

    def sent(self, request: Routed, scheduler: SchedulerPeer) -> None:
        """Of no importance."""

    def gone(self, peer: str) -> None:
        """Of no importance."""


class LeastLoaded(RoundRobin):
    """Each request to the scheduler with the fewest tokens: its last heartbeat's, and those sent there since."""

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """By tokens; equals take turns."""
        return sorted(super().order(request, schedulers), key=lambda each: each.tokens)


class PowerOfTwo(RoundRobin):
    """Each request to the less loaded of two drawn by lot: frontends that know equally little do not all choose one."""

    def __init__(self, chance: random.Random | None = None) -> None:
        super().__init__()
        self._chance = chance or random.Random()  # noqa: S311 - nothing secret hangs on it

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:  # noqa: ARG002
        """The two, then the others in the order of the lots."""
        drawn = self._chance.sample(schedulers, len(schedulers))
        return sorted(drawn[:2], key=lambda each: each.tokens) + drawn[2:]


class CacheAware:
    """Each request to the scheduler that was sent the most of its prompt before, unless that one has too much to do.

    A prompt that nobody has seen goes where the least is remembered, so that every cache is filled.
    """

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()
        self._trees: dict[str, PrefixTree] = {}

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """By the prefix found; if it is short, by what is remembered; by load if the first has too much to do."""
        by_load = self._least_loaded.order(request, schedulers)
        if len(by_load) == 1:
            return by_load
        found = {each.peer: self._match(each.peer, request) for each in by_load}
        if max(found.values()) < WORTHWHILE * request.prompt_tokens:
            chosen = sorted(by_load, key=lambda each: self._remembered(each.peer))
        else:
            chosen = sorted(by_load, key=lambda each: -found[each.peer])
        return by_load if _has_too_much(chosen[0], by_load[0]) else chosen

    def sent(self, request: Routed, scheduler: SchedulerPeer) -> None:
        """Remember its prompt."""
        tree = self._trees.get(scheduler.peer)
        if tree is None:
            size = scheduler.limits.max_total_tokens if scheduler.limits else 0
            tree = self._trees[scheduler.peer] = PrefixTree(min(size, MOST_REMEMBERED))
        tree.insert(request.salt, request.prompt_ids)

    def gone(self, peer: str) -> None:
        """Forget what it was sent."""
        self._trees.pop(peer, None)

    def _match(self, peer: str, request: Routed) -> int:
        tree = self._trees.get(peer)
        return 0 if tree is None else tree.match(request.salt, request.prompt_ids)

    def _remembered(self, peer: str) -> int:
        tree = self._trees.get(peer)
        return 0 if tree is None else tree.tokens


def _has_too_much(home: SchedulerPeer, least: SchedulerPeer) -> bool:
    """Whether a request is better off at the one with the least, though that has to compute its whole prompt."""
    waits = home.load.queued and not home.load.slots_free
    if waits and least.load.slots_free and not least.load.queued:
        return True
    return home.tokens > max(least.tokens + UNEVEN_TOKENS, UNEVEN_RATIO * least.tokens)


POLICIES: dict[str, Callable[[], RoutingPolicy]] = {
    "cache_aware": CacheAware,
    "least_loaded": LeastLoaded,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
}
