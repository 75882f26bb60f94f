"""`FairShare`: whoever was served least is served next, so that nobody waits behind all that another has asked for.

The Virtual Token Counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024,
https://arxiv.org/abs/2401.00588). Each tenant has a counter of the tokens it was given, and whenever there is room, the
tenant with the least takes it, with its earliest choice. A prompt is charged as a whole when it is admitted, without
what need not be computed; an output token when it is known, so that a wrong guess costs its tenant nothing. Nor does
what is computed again after a retraction: the tenant has nothing of it.

A tenant that begins to wait is lifted to the least counter of those that wait already, so that nobody saves up.

So while two tenants wait, their counters differ by no more than U, which is the longest prompt and all the output that
can run at a time, and what they are given in that time by no more than 2 U.
"""

from collections.abc import Iterable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from tercet.scheduler.core.prefix_cache import PrefixCache
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.token_counters import Account, VirtualTokenCounters

PROMPT_TOKEN = 1
OUTPUT_TOKEN = 2
"""What a token costs: one of a prompt is computed beside many others, one of an output has a step to itself."""

MOST_SKIPPED = 32
"""Choices of one tenant that a step may skip before it looks at others': it looks at a limited number."""


class FairShare:
    """By what tenants were given, and within a tenant by arrival."""

    def __init__(self) -> None:
        self.accounts = VirtualTokenCounters()

    def order(self, waiting: list[Req], cache: PrefixCache) -> Iterator[Req]:  # noqa: ARG002
        """Always the next of the tenant that has been given least so far, with what was admitted meanwhile."""
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
        """The first of each tenant's that was skipped for somebody who stood behind it.

        To wait while it is another's turn is no wrong, or all of a flood's choices would go first in the end. The rest
        of a tenant's waits for its first.
        """
        first: dict[str, Req] = {}
        for req in skipped:
            first.setdefault(req.tenant, req)
        return first.values()

    def goes_first(self, req: Req) -> bool:
        """Only with output, as those have that ran. A crash brings back all that a flood has waiting, too."""
        return req.resumed and req.output_tokens > 0

    def joined(self, req: Req) -> None:
        """One more of its tenant's waits."""
        self.accounts.joined(req.tenant)

    def left(self, req: Req) -> None:
        """One less waits."""
        self.accounts.left(req.tenant)

    def admitted(self, req: Req) -> None:
        """Charge for the prompt, the first time."""
        if req.charged < 0:
            account = self.accounts[req.tenant]
            account.served += PROMPT_TOKEN * (len(req.tokens) - req.computed)
            account.begun += 1
            req.charged = len(req.tokens)

    def advanced(self, reqs: Iterable[Req]) -> None:
        """Charge for new output."""
        for req in reqs:
            tokens = len(req.tokens)
            if tokens > req.charged:
                self.accounts[req.tenant].served += OUTPUT_TOKEN * (tokens - req.charged)
                req.charged = tokens

    def ended(self, req: Req) -> None:
        """Charge for the rest; nothing comes of it any more."""
        if req.charged >= 0:
            self.advanced((req,))
            self.accounts[req.tenant].begun -= 1


class _Line:
    """Choices of one tenant, and how far an order has come with them."""

    __slots__ = ("_account", "place", "reqs", "skipped")

    def __init__(self, account: Account, reqs: list[Req]) -> None:
        self._account = account
        self.reqs = reqs
        self.place = 0
        self.skipped = 0

    @property
    def standing(self) -> tuple[int, int, int, int]:
        """Sorts lines. Of equals, that of whoever has less begun goes first, and so a newcomer."""
        account = self._account
        return self.skipped // MOST_SKIPPED, account.served, account.begun, self.reqs[self.place].arrival
