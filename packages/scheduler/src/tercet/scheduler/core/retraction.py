"""Shares of pages: the choices that give up slot and pages when pages run out, and the tenants that may take them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from tercet.scheduler.core.cache.prefix_cache import Node
from tercet.scheduler.core.request import Req

REGROWTH = 8
"""Share of its tokens, as a divisor, that a choice that yielded must add before it yields again.

All its recomputation for other tenants is therefore at most `REGROWTH` + 1 times its final length.
"""
LITTLE = 16
"""Computed tokens up to which a choice may yield anyway, unless it is its tenant's oldest, which has to get on."""


def held_pages(running: Iterable[Req]) -> Counter[str]:
    """Return the pages of each tenant; pages that its choices share count once."""
    held: Counter[str] = Counter()
    seen: set[Node] = set()
    for req in running:
        held[req.tenant] += len(req.pages[0]) - req.shared
        node = req.node
        while node is not None and node not in seen:
            seen.add(node)
            held[req.tenant] += len(node.pages[0])
            node = node.parent
    return held


def next_to_retract(choices: Iterable[Req]) -> Req | None:
    """Return one of some running choices, which no plan in flight names; None if all are in one.

    Choices of tenants that hold less than the mean go last. Of the others, the lowest priority goes first, then the
    tenant with the most pages, then the choice that costs least to recompute.
    """
    choices = list(choices)
    held = held_pages(choices)
    mean = held.total() / max(1, len(held))
    idle = (req for req in choices if req.in_flight == 0 and req.finish is None)
    return min(
        idle,
        key=lambda req: (held[req.tenant] < mean, req.priority, -held[req.tenant], len(req.tokens), -req.arrival),
        default=None,
    )


def sitting_out(running: Collection[Req], share: int, step: int, is_blocked: Callable[[Req], bool]) -> list[Req]:
    """Return the decoding choices that sit out a step, so that it has `share` of their tenant: they take turns.

    None do unless another tenant decodes with no more than `share`: only then does a shorter step help a tenant.
    """
    if len(running) <= share:
        return []
    lines: dict[str, list[Req]] = {}
    for req in running:
        if req.has_work and req.length == req.computed + 1 and not is_blocked(req):
            lines.setdefault(req.tenant, []).append(req)
    if min(map(len, lines.values()), default=0) > share:
        return []
    left_out: list[Req] = []
    for line in lines.values():
        if len(line) > share and len(lines) > 1:
            first = step * share % len(line)
            turned = [*line[first:], *line[:first]]  # among those that waited equally long, each is first in turn
            left_out += sorted(turned, key=lambda req: req.last_step)[share:]
    return left_out


class PageShares:
    """Equal shares of the pages of tenants that run or wait, and the pages that each of them holds and expects.

    A tenant within its share gets pages even if none are free: tenants above theirs yield some. A tenant alone has no
    share.
    """

    def __init__(
        self, running: Iterable[Req], waiting: Collection[str], total: int, expected: Callable[[Req], int]
    ) -> None:
        """Count the pages of running choices; `expected` returns the pages that a choice will probably request."""
        running = list(running)
        self._expected = expected
        self.held = held_pages(running)
        self._due: Counter[str] = Counter()
        for req in running:
            self._due[req.tenant] += expected(req)
        tenants = len(self.held.keys() | waiting)
        self._share = total // tenants if tenants > 1 else 0

    @property
    def reserve(self) -> int:
        """Number of pages that running choices will probably request."""
        return self._due.total()

    def took(self, req: Req) -> None:
        """Count a choice that has got pages."""
        self.held[req.tenant] += len(req.pages[0]) - req.shared
        self._due[req.tenant] += self._expected(req)

    def may_grow(self, tenant: str) -> bool:
        """Return whether a tenant holds less than its share."""
        return self.held[tenant] < self._share

    def may_start(self, req: Req, pages: int) -> bool:
        """Return whether a tenant stays within its share with a waiting choice, which needs `pages` pages now."""
        return self.held[req.tenant] + self._due[req.tenant] + pages + self._expected(req) <= self._share

    def yielding(self, running: Iterable[Req], short: int) -> list[Req]:
        """Return the choices that yield their pages, so that about `short` pages become free.

        The tenant with the most pages yields, as long as it holds more than its share: the lowest priority first, then
        choices that no plan names, then the newest.
        """
        held = self.held.copy()
        lines: dict[str, list[Req]] = {}
        oldest: dict[str, Req] = {}
        for req in sorted(running, key=lambda req: req.arrival):
            gets_on = req is oldest.setdefault(req.tenant, req) or req.computed > LITTLE
            if req.finish is None and held[req.tenant] > self._share and (_has_grown(req) or not gets_on):
                lines.setdefault(req.tenant, []).append(req)
        for line in lines.values():
            line.sort(key=lambda req: (-req.priority, req.in_flight == 0, req.arrival))
        chosen = []
        while short > 0 and lines:
            tenant = max(lines, key=lambda name: held[name])
            if held[tenant] <= self._share or not lines[tenant]:
                del lines[tenant]
                continue
            req = lines[tenant].pop()
            if pages := _freed_pages(req):
                chosen.append(req)
                held[tenant] -= pages
                short -= pages
        return chosen


def _has_grown(req: Req) -> bool:
    """Return whether a choice has grown enough since it last yielded."""
    return REGROWTH * (len(req.tokens) - req.yielded) >= req.yielded


def _freed_pages(req: Req) -> int:
    """Return the number of pages that no other choice uses."""
    pages, node = len(req.pages[0]) - req.shared, req.node
    while node is not None and node.locks == 1:
        pages += len(node.pages[0])
        node = node.parent
    return pages
