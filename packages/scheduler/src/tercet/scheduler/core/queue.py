"""Queue of choices that wait for a slot: retracted ones first, then new ones in the order of the policy.

`InFlightPrefixes` finds those that rather wait longer.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from tercet.scheduler.core.policy import SchedulePolicy
from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req

LEAST_SPARED = 64
"""Minimum tokens saved to put a choice off: a step takes as long with fewer."""


def room(tenant: str, free: int, own: int) -> int:
    """Return how many of a queue's `free` places a tenant with `own` places may take: as many as it leaves free.

    A tenant without places therefore always finds one, even if others flood the queue: n tenants that request all
    places get 1 / (n + 1) each. This is the dynamic threshold of "Dynamic Queue Length Thresholds for Shared-Memory
    Packet Switches" (Choudhury and Hahne, 1998). Requests without a tenant come from a server without keys and have no
    limit.
    """
    return free - own if tenant else free


class WaitingQueue:
    """Waiting queue. Arrival numbers break ties, so a retracted choice keeps its place."""

    def __init__(self, policy: SchedulePolicy, max_skips: int) -> None:
        self._policy = policy
        self._max_skips = max_skips
        self._first: dict[Req, None] = {}
        self._rest: dict[Req, None] = {}
        self.tenants: Counter[str] = Counter()
        """Number of waiting choices by tenant."""
        self._sorted = True
        """`_rest` is in order of arrival."""

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    def __contains__(self, req: Req) -> bool:
        return req in self._first or req in self._rest

    def __iter__(self) -> Iterator[Req]:
        yield from self._first
        yield from self._rest

    def add(self, req: Req, *, first: bool = False) -> None:
        """Add a choice; `first` is for those that ran before, or resume an earlier attempt."""
        self._policy.joined(req)
        self.tenants[req.tenant] += 1
        if first:
            self._first[req] = None
            return
        if self._rest and next(reversed(self._rest)).arrival > req.arrival:
            self._sorted = False
        self._rest[req] = None

    def remove(self, req: Req) -> None:
        """Remove a choice."""
        del (self._first if req in self._first else self._rest)[req]
        self._policy.left(req)
        self.tenants[req.tenant] -= 1
        if not self.tenants[req.tenant]:
            del self.tenants[req.tenant]

    def admit(self, req: Req) -> None:
        """Remove a choice that got a slot."""
        self.remove(req)
        self._policy.admitted(req)

    def in_order(self, cache: PrefixCache, tenants: Collection[str] | None = None) -> Iterator[Req]:
        """Return the choices to admit next, of some tenants or of all.

        Those that go first come before those skipped `max_skips` times, and these before the policy's order. The caller
        may admit choices meanwhile.
        """
        if not self._sorted:
            self._rest = dict(sorted(self._rest.items(), key=lambda item: item[0].arrival))
            self._sorted = True
        first = sorted(self._first, key=lambda req: req.arrival)
        rest = list(self._rest)
        if tenants is not None and len(tenants) < len(self.tenants):
            rest = [req for req in rest if req.tenant in tenants]
        aged = [req for req in rest if req.times_skipped >= self._max_skips]
        if not aged:
            return chain(first, self._policy.order(rest, cache))
        young = [req for req in rest if req.times_skipped < self._max_skips]
        return chain(first, aged, self._policy.order(young, cache))

    def count_skips(self, admitted: Sequence[Req], skipped: Sequence[Req]) -> None:
        """Age overtaken choices. The step `skipped` those that could have run and stood before an admitted one."""
        for req in self._policy.overtaken(self, admitted, skipped):
            req.times_skipped += 1


class InFlightPrefixes:
    """Index of the prefixes that the prefix cache will contain once the prompts of running choices are computed.

    Of choices that arrive together with the same prefix, the first computes it and the others find it a few steps
    later; otherwise each would compute its own. SGLang puts off such choices, too. vLLM shares pages as soon as they
    are planned, which here would share them before their logits are known to be finite.
    """

    def __init__(self, running: Iterable[Req], page_size: int) -> None:
        self._page_size = page_size
        self._least = page_size * -(-LEAST_SPARED // page_size)
        """Minimum common tokens of two prompts for one to wait: `LEAST_SPARED`, rounded up to whole pages."""
        self._by_beginning: dict[tuple[str, bytes], list[Req]] = {}
        for req in running:
            self.add(req)

    def add(self, req: Req) -> None:
        """Add a running choice, unless its prompt is shared already or never will be."""
        if not req.published and req.finish is None and req.prompt_tokens >= self._least:
            self._by_beginning.setdefault(self._beginning(req), []).append(req)

    def is_worth_waiting(self, req: Req, cache: PrefixCache) -> bool:
        """Return whether a running prompt saves a waiting choice as many tokens as that prompt has left to plan."""
        alike = self._by_beginning.get(self._beginning(req))
        if not alike:
            return False
        cached = req.cached_pages(cache) * self._page_size
        reusable = req.reusable
        for other in alike:
            spared = max(LEAST_SPARED, other.prompt_tokens - other.computed)
            end = cached + self._page_size * -(-spared // self._page_size)
            if end <= reusable and end <= other.prompt_tokens and _begin_alike(req, other, cached, end):
                return True
        return False

    def _beginning(self, req: Req) -> tuple[str, bytes]:
        return req.salt, req.cache_key(self._least)


def _begin_alike(req: Req, other: Req, cached: int, end: int) -> bool:
    """Return whether two prompts have the same tokens up to `end`; those up to `cached` are in the prefix cache.

    Prompts that differ mostly do so right behind the cached tokens. These positions are compared first, since prompts
    can be long, and each waiting one may be compared with each running one.
    """
    one, another = req.tokens, other.tokens
    return (
        one[cached] == another[cached] and one[cached:end] == another[cached:end] and one[:cached] == another[:cached]
    )
