"""Routing policies: the order in which schedulers are tried for a request."""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from tercet.frontend.routing.peers import SchedulerPeer
from tercet.frontend.routing.prefix_tree import TOKEN, PrefixTree

BALANCE_ABS_THRESHOLD = 8192
BALANCE_REL_THRESHOLD = 1.5
"""A scheduler is overloaded if it has `BALANCE_ABS_THRESHOLD` more than the least loaded one and
`BALANCE_REL_THRESHOLD` times as many, or if choices wait for a slot there while the least loaded one has free slots."""
IDLE_FACTOR = 4
"""Beside an idle scheduler, one is overloaded that has so many times the tokens that the idle one lacks."""
BUSY_IMAGES = 4
"""An encoder has much work if it has `BALANCE_REL_THRESHOLD` times the tokens of the least loaded one, and so many
images of the present one's size beside."""
CACHE_THRESHOLD = 0.1
"""Minimum share of a prompt that must match a scheduler's prefixes for the cache to decide its routing."""
HASHED_TOKENS = 32
"""Tokens after a match that are hashed. Matches that differ by less are equal."""
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
    @property
    def content(self) -> bytes:
        """Return the hash of an image or sound to encode; empty for other requests."""
        ...


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


class ByContent(LeastLoaded):
    """Policy for encoders: equal images of a namespace go to one (rendezvous hashing), which may have them encoded.

    If that one has much work, and for inputs of text, the least loaded one is preferred.
    """

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Sort by the hash of namespace and content, or by load."""
        by_load = super().order(request, schedulers)
        if not request.content:
            return by_load
        hashed = request.salt.encode() + request.content
        chosen = sorted(by_load, key=lambda each: _rank(hashed, each.peer))
        most = BALANCE_REL_THRESHOLD * by_load[0].tokens + BUSY_IMAGES * request.prompt_tokens
        return by_load if chosen[0].tokens > most else chosen


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

    Between equal matches, a hash of the scheduler and of the tokens after the match decides (rendezvous hashing, Thaler
    and Ravishankar 1996). So frontends that do not know each other's requests send equal prompts to one scheduler.
    """

    def __init__(self) -> None:
        self._least_loaded = LeastLoaded()
        self._trees: dict[str, PrefixTree] = {}

    def order(self, request: Routed, schedulers: Sequence[SchedulerPeer]) -> list[SchedulerPeer]:
        """Sort by matching prefix, then by the hash; by load if the first is overloaded.

        If little follows the match, equal matches are sorted by load. Idle schedulers come first if the best one has
        much work.
        """
        by_load = self._least_loaded.order(request, schedulers)
        if len(by_load) == 1:
            return by_load
        found = {each.peer: self._match(each.peer, request) for each in by_load}
        few = CACHE_THRESHOLD * request.prompt_tokens
        if max(found.values()) < few:
            found = dict.fromkeys(found, 0)
        match = max(found.values()) // HASHED_TOKENS * HASHED_TOKENS
        if request.prompt_tokens - match < few:
            chosen = sorted(by_load, key=lambda each: -found[each.peer])
        else:
            hashed = request.salt.encode() + request.prompt_ids[TOKEN * match : TOKEN * (match + HASHED_TOKENS)]
            chosen = sorted(by_load, key=lambda each: (-(found[each.peer] // HASHED_TOKENS), _rank(hashed, each.peer)))
        home, least = chosen[0], by_load[0]
        if _is_overloaded(home, least):
            return by_load
        lost = max(found[home.peer] - found[least.peer], HASHED_TOKENS)
        if not least.tokens and home.tokens > IDLE_FACTOR * lost:
            return sorted(chosen, key=lambda each: each.tokens > 0)
        return chosen

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


def _rank(hashed: bytes, peer: str) -> bytes:
    return hashlib.blake2b(hashed + peer.encode(), digest_size=8).digest()


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
