"""Fair-share policy: the tenant with the least service goes next.

No tenant waits behind all requests of another. The policy is the Virtual Token Counter of "Fairness in Serving Large
Language Models" (Sheng et al., OSDI 2024, https://arxiv.org/abs/2401.00588). Each tenant has a counter of the tokens it
was served. When there is room, the tenant with the lowest counter gets it, with its earliest choice. A prompt is
charged as a whole when it is admitted, without its cached tokens. An output token is charged when it is known, so that
a rejected draft token costs its tenant nothing. Recomputation after a retraction is not charged, either.

A tenant that begins to wait is lifted to the lowest counter of the waiting tenants, so that it cannot save up service.

While two tenants wait, their counters therefore differ by at most U, the longest prompt plus all output that can run at
a time, and the service they get in that time differs by at most 2 U.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.token_counters import Account, VirtualTokenCounters

PROMPT_TOKEN = 1
OUTPUT_TOKEN = 2
"""Costs of a token. A prompt token is computed beside many others, an output token has a step of its own."""

MOST_SKIPPED = 32
"""Limit of skipped choices of one tenant before a step looks at other tenants; a step looks at a limited number."""


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
