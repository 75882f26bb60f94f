"""Queue of inputs that wait for a step: redispatched ones first, then new ones, unless tenants take turns."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from tercet.scheduler.core.config import PolicyName
from tercet.scheduler.core.embedding.req import EmbeddingReq
from tercet.scheduler.core.waiting.fair_share import VirtualTokenCounters
from tercet.scheduler.core.waiting.queue import room


class EmbeddingQueue:
    """Order of arrival, or of priority under the policy `priority`; inputs that were overtaken too often go first.

    Under `fair` the tenant whose inputs had the fewest tokens so far comes next, with its earliest one. This also holds
    after a crash, which brings back all waiting inputs of a tenant.
    """

    def __init__(self, policy: PolicyName, max_skips: int) -> None:
        self._by_priority = policy is PolicyName.PRIORITY
        self.accounts = VirtualTokenCounters() if policy is PolicyName.FAIR else None
        self._max_skips = max_skips
        self.tenants: Counter[str] = Counter()
        """Number of waiting inputs by tenant."""
        self._first: dict[EmbeddingReq, None] = {}
        self._rest: dict[EmbeddingReq, None] = {}

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    def __contains__(self, req: EmbeddingReq) -> bool:
        return req in self._first or req in self._rest

    def __iter__(self) -> Iterator[EmbeddingReq]:
        return chain(self._first, self._rest)

    def room(self, tenant: str, most: int) -> int:
        """Return how many more inputs of a tenant may wait, if `most` of all tenants may."""
        return room(tenant, most - len(self), self.tenants[tenant])

    def add(self, req: EmbeddingReq) -> None:
        """Add an input."""
        self.tenants[req.tenant] += 1
        if self.accounts is not None:
            self.accounts.joined(req.tenant)
        first = req.attempt > 0 and self.accounts is None
        (self._first if first else self._rest)[req] = None

    def remove(self, req: EmbeddingReq) -> None:
        """Remove an input; does nothing if it does not wait."""
        if req not in self:
            return
        del (self._first if req in self._first else self._rest)[req]
        self.tenants[req.tenant] -= 1
        if not self.tenants[req.tenant]:
            del self.tenants[req.tenant]
        if self.accounts is not None:
            self.accounts.left(req.tenant)

    def take(self, planned: list[EmbeddingReq]) -> None:
        """Remove the inputs of a plan, and age those that a later arrival has overtaken."""
        for req in planned:
            self.remove(req)
            if self.accounts is not None:
                self.accounts[req.tenant].served += req.tokens
        if self._by_priority:
            latest = max(req.arrival for req in planned)
            for req in self._rest:
                req.times_skipped += req.arrival < latest

    def in_order(self) -> Iterable[EmbeddingReq]:
        """Return the inputs in the order of planning. Do not remove any while iterating."""
        if self._by_priority:
            return chain(self._first, sorted(self._rest, key=self._rank))
        return self if self.accounts is None else self._in_turn(self.accounts)

    def _in_turn(self, accounts: VirtualTokenCounters) -> Iterator[EmbeddingReq]:
        """Yield inputs as if each one yielded were planned.

        If service is equal, the tenant with fewer inputs goes first.
        """
        lines: dict[str, deque[EmbeddingReq]] = {}
        for req in self._rest:
            lines.setdefault(req.tenant, deque()).append(req)
        heap = [(accounts[tenant].served, len(line), line[0].arrival, line) for tenant, line in lines.items()]
        heapify(heap)
        while heap:
            served, _, _, line = heappop(heap)
            req = line.popleft()
            yield req
            if line:
                heappush(heap, (served + req.tokens, len(line), line[0].arrival, line))

    def _rank(self, req: EmbeddingReq) -> tuple[bool, int, int]:
        patient = req.times_skipped < self._max_skips
        return patient, -req.priority if patient else 0, req.arrival
