"""Shares of slots and pages that are kept for tenants that have none, under every policy.

A tenant takes up to `SHARE` times as many slots as it leaves free, and leaves one page free for each `SHARE` it holds.
A tenant that floods the scheduler alone therefore has all but a ninth of it, and the first request of another tenant
neither waits for an answer of the flood to end nor queues behind it. This is the dynamic threshold of the queue
(`queue.room`) with another factor. Requests without a tenant come from a server without keys and may take all.
"""

from collections import Counter
from collections.abc import Iterable

from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.request import Req

SHARE = 8


class SlotShares:
    """Slots and pages of each tenant while a step admits choices."""

    def __init__(self, running: Iterable[Req], memory: KVMemory) -> None:
        self._memory = memory
        self._slots: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._newcomers = False
        for req in running:
            self.took(req)

    def took(self, req: Req) -> None:
        """Count a choice that has got a slot."""
        self._slots[req.tenant] += 1
        self._pages[req.tenant] += len(req.pages[0])

    def only_newcomers(self) -> None:
        """Admit only tenants without a slot from now on: pages are short."""
        self._newcomers = True

    def may_run(self, tenant: str) -> bool:
        """Return whether a tenant may take one more slot."""
        own, free = self._slots[tenant], len(self._memory.free_slots)
        if not own or not tenant:
            return free > 0 and not (own and self._newcomers)
        left = free - 1 if self._slots.total() + free > SHARE else free  # the last is for a tenant that has none
        return not self._newcomers and own < SHARE * left

    def kept_pages(self, tenant: str) -> int:
        """Return how many pages a tenant must leave to others."""
        return self._pages[tenant] // SHARE if tenant else 0
