"""Queue of choices that wait for a slot: retracted ones first, then new ones in the order of the policy."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from tercet.scheduler.core.cache.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.waiting.policy import SchedulePolicy


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
