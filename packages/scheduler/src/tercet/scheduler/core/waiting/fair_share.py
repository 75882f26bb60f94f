"""Fair shares of tenants: the policy by service, and slots and pages that every policy keeps for tenants without any.

Under the policy no tenant waits behind all requests of another. It is the Virtual Token Counter of "Fairness in Serving
Large Language Models" (Sheng et al., OSDI 2024, https://arxiv.org/abs/2401.00588). Each tenant has a counter of the
tokens it was served. When there is room, the tenant with the lowest counter gets it, with its earliest choice. A prompt
is charged as a whole when it is admitted, without its cached tokens. An output token is charged when it is known, so
that a rejected draft token costs its tenant nothing. Recomputation after a retraction is not charged, either.

A tenant that begins to wait is lifted to the lowest counter of the waiting tenants. Otherwise it could save up service
while it requests little, and come before others for as long once it requests much. The same holds for a tenant with
only running choices.

While two tenants wait, their counters therefore differ by at most U, the longest prompt plus all output that can run at
a time, and the service they get in that time differs by at most 2 U.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from tercet.scheduler.core.cache.prefix_cache import PrefixCache
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.retraction import PageShares

PROMPT_TOKEN = 1
OUTPUT_TOKEN = 2
"""Costs of a token. A prompt token is computed beside many others, an output token has a step of its own."""
MOST_SKIPPED = 32
"""Limit of skipped choices of one tenant before a step looks at other tenants; a step looks at a limited number."""
SHARE = 8


@dataclass(slots=True)
class Account:
    """Service of a tenant, and the number of its waiting and started choices."""

    served: int = 0
    waiting: int = 0
    begun: int = 0


class VirtualTokenCounters:
    """Accounts of all tenants, except those without choices here that would be lifted on their return."""

    def __init__(self) -> None:
        self.by_tenant: dict[str, Account] = {}
        self._last = Account()
        """Account of the tenant that was the last to wait."""

    def __getitem__(self, tenant: str) -> Account:
        return self.by_tenant[tenant]

    def joined(self, tenant: str) -> None:
        """Count one more waiting choice. If it is the tenant's only one, lift the tenant."""
        account = self.by_tenant.get(tenant)
        if account is None or not account.waiting:
            level = self._level()
            self.by_tenant = {
                name: each for name, each in self.by_tenant.items() if each.waiting or each.begun or each.served > level
            }
            account = self.by_tenant.setdefault(tenant, Account())
            account.served = max(account.served, level)
        account.waiting += 1

    def left(self, tenant: str) -> None:
        """Count one waiting choice less."""
        account = self.by_tenant[tenant]
        account.waiting -= 1
        if not account.waiting:
            self._last = account

    def _level(self) -> int:
        """Return the minimum counter of a tenant that begins to wait. It never falls."""
        return min((each.served for each in self.by_tenant.values() if each.waiting), default=self._last.served)


class FairShare:
    """Order by service per tenant, and by arrival within a tenant."""

    def __init__(self) -> None:
        self.accounts = VirtualTokenCounters()

    def order(self, waiting: list[Req], cache: PrefixCache) -> Iterator[Req]:  # noqa: ARG002
        """Yield the next choice of the tenant with the least service, which includes choices admitted meanwhile."""
        lines: dict[str, list[Req]] = {}
        for req in waiting:
            lines.setdefault(req.tenant, []).append(req)
        heap = [(line.standing, line) for line in (_Line(self.accounts[name], reqs) for name, reqs in lines.items())]
        heapify(heap)
        while heap:
            line = heap[0][1]
            req = line.reqs[line.place]
            yield req
            line.place += 1
            line.skipped += req.slot < 0
            if line.place < len(line.reqs):
                heapreplace(heap, (line.standing, line))
            else:
                heappop(heap)

    def overtaken(self, waiting: Iterable[Req], admitted: Sequence[Req], skipped: Sequence[Req]) -> Iterable[Req]:  # noqa: ARG002
        """Return the first skipped choice of each tenant that was overtaken by one behind it.

        Waiting for another tenant's turn does not count as being overtaken; otherwise all choices of a flood would go
        first in the end. A tenant's other choices wait for its first.
        """
        first: dict[str, Req] = {}
        for req in skipped:
            first.setdefault(req.tenant, req)
        return first.values()

    def goes_first(self, req: Req) -> bool:
        """Return whether a resumed choice has output, so that it ran before.

        A crash brings back a flood's waiting choices, too.
        """
        return req.resumed and req.output_tokens > 0

    def joined(self, req: Req) -> None:
        self.accounts.joined(req.tenant)

    def left(self, req: Req) -> None:
        self.accounts.left(req.tenant)

    def admitted(self, req: Req) -> None:
        """Charge for the prompt at the first admission."""
        if req.charged < 0:
            account = self.accounts[req.tenant]
            account.served += PROMPT_TOKEN * (len(req.tokens) - req.computed)
            account.begun += 1
            req.charged = len(req.tokens)

    def advanced(self, reqs: Iterable[Req]) -> None:
        """Charge for new output tokens."""
        for req in reqs:
            tokens = len(req.tokens)
            if tokens > req.charged:
                self.accounts[req.tenant].served += OUTPUT_TOKEN * (tokens - req.charged)
                req.charged = tokens

    def ended(self, req: Req) -> None:
        """Charge for the remaining output tokens, and note that the choice no longer runs."""
        if req.charged >= 0:
            self.advanced((req,))
            self.accounts[req.tenant].begun -= 1


class _Line:
    """Choices of one tenant, and the position of an order in them."""

    __slots__ = ("_account", "place", "reqs", "skipped")

    def __init__(self, account: Account, reqs: list[Req]) -> None:
        self._account = account
        self.reqs = reqs
        self.place = 0
        self.skipped = 0

    @property
    def standing(self) -> tuple[int, int, int, int]:
        """Return the sort key of lines. If service is equal, the tenant with fewer started choices goes first."""
        account = self._account
        return self.skipped // MOST_SKIPPED, account.served, account.begun, self.reqs[self.place].arrival


class SlotShares:
    """Slots and pages of each tenant while a step admits choices.

    A tenant takes up to `SHARE` times as many slots as it leaves free, and leaves one page free for each `SHARE` it
    holds. A tenant that floods the scheduler alone therefore has all but a ninth of it, and the first request of
    another tenant neither waits for an answer of the flood to end nor queues behind it. This is the dynamic threshold
    of the queue (`queue.room`) with another factor. Room for windows is counted as slots are. Requests without a tenant
    come from a server without keys and may take all.
    """

    def __init__(
        self,
        running: Iterable[Req],
        memory: KVMemory,
        page_shares: PageShares | None = None,
        *,
        scarce: bool = False,
    ) -> None:
        """Count running choices. Without `page_shares`, no tenant has a share of the pages."""
        self._memory = memory
        self.page_shares = page_shares
        self._slots: Counter[str] = Counter()
        self._pages: Counter[str] = Counter()
        self._scarce = scarce
        for req in running:
            self._count(req)

    def took(self, req: Req) -> None:
        """Count a choice that has got a slot."""
        self._count(req)
        if self.page_shares is not None:
            self.page_shares.took(req)

    def _count(self, req: Req) -> None:
        self._slots[req.tenant] += 1
        self._pages[req.tenant] += len(req.pages[0])

    def mark_scarce(self) -> None:
        """Admit only choices that are due pages from now on, and tenants without a slot."""
        self._scarce = True

    def is_due(self, req: Req) -> bool:
        """Return whether a choice gets pages while they are scarce: it keeps its tenant within its share of them."""
        shares = self.page_shares
        return shares is not None and shares.may_start(req, self._memory.pages_for(len(req.tokens)))

    def is_passed_over(self, req: Req) -> bool:
        """Return whether a choice is passed over because pages are scarce."""
        return self._scarce and self._slots[req.tenant] > 0 and not self.is_due(req)

    def may_overtake(self, req: Req, max_skips: int) -> bool:
        """Return whether others may be admitted before a choice that finds no pages.

        If its tenant runs others, these hold the pages, and none starts before it. It therefore does not wait forever.
        """
        if not req.tenant or self._slots[req.tenant]:
            return bool(req.tenant)
        return not req.output_tokens and req.times_skipped < max_skips

    def may_run(self, tenant: str) -> bool:
        """Return whether a tenant may take one more slot."""
        own, free = self._slots[tenant], len(self._memory.free_slots)
        if not own or not tenant:
            return free > 0 and not (own and self._scarce)
        if self._scarce and (self.page_shares is None or not self.page_shares.may_grow(tenant)):
            return False
        spare = self._slots.total() + free > SHARE
        left = self._memory.free_places - spare  # the last is for a tenant that has none
        return own < SHARE * left

    def kept_pages(self, req: Req, expected: int, reserve: int) -> int:
        """Return how many pages a choice must leave, which expects to take `expected` more and the running `reserve`.

        A tenant within its share need not leave any: if they are short later, tenants above theirs yield some.
        """
        if self.is_due(req):
            return 0
        if req.tenant and not self._slots[req.tenant]:
            return expected
        return expected + reserve + (self._pages[req.tenant] // SHARE if req.tenant else 0)
