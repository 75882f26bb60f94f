"""Pages of running choices in the group of layers with a sliding window.

A choice needs the pages that its next token attends to, and those that plans in flight name. It gets them step by step,
as rows need them. Earlier ones stay while there is room, so that the prefix cache can take them over with the prompt;
if pages are short, they are given up first, and then pages of the cache. A choice is admitted only if the group has
room for its window beside those of all others, so a row always finds its pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tercet.scheduler.core.cache.page_pools import PagePool
from tercet.scheduler.core.cache.prefix_cache import Match, Node, PageLists
from tercet.scheduler.core.cache.window_cache import WindowRadixCache
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.plan import Capacity, PageUpdate, Plan, Row
from tercet.scheduler.core.request import Req


def window_pages(window: int, page_size: int, choices: int, step_tokens: int, stages: int = 1) -> int:
    """Return the pages that the windows of some choices take, with the tokens of plans that are not committed.

    These are a plan in flight for each pipeline stage, and the one under construction.
    """
    of_choice = -(-window // page_size) + 2  # the window and a plan's tokens may begin and end inside a page
    return choices * of_choice + (stages + 1) * -(-step_tokens // page_size)


@dataclass(slots=True)
class _Holding:
    """Pages of a running choice: those with the indices `first` to `end` of its page table."""

    first: int
    pages: list[int]
    sent: int
    """Index of the first page that no plan has written to the executor's page table."""
    oldest: int
    """Position of the oldest token that a later row, or one in flight, may start with."""
    branch: int
    """Length of the longest prefix that is cached except for its window, in tokens; 0 for none."""
    reserved: int
    """Pages that are kept for its window."""

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class WindowPages:
    """Window pages of all running choices."""

    def __init__(self, capacity: Capacity, config: CoreConfig) -> None:
        """Create the pool of the last group. Raises ValueError if it does not hold the window of one choice."""
        *others, group = capacity.groups
        step_tokens = max(config.token_budget, capacity.slots) + capacity.excess_tokens
        sizes = group.window, capacity.page_size
        of_plans, least = (window_pages(*sizes, count, step_tokens, config.stages) for count in (0, 1))
        if group.pages < least:
            raise ValueError(f"{group.pages} pages do not hold a window of {group.window} tokens: {least} are needed")
        self.pool = PagePool(group.pages)
        self._of_choice = least - of_plans
        self._most = group.pages - of_plans
        self.reserved = 0
        """Pages that are reserved for windows of running choices."""
        self.cache: WindowRadixCache | None = None
        self.holdings: dict[Req, _Holding] = {}
        self.window = group.window
        self._page_size = capacity.page_size
        self._unchanged: PageLists = [[] for _ in others]

    @property
    def free_windows(self) -> int:
        """Number of choices with long contexts for which there is room."""
        return (self._most - self.reserved) // self._of_choice

    def can_admit(self, req: Req) -> bool:
        """Return whether there is room for the window of a choice."""
        return self.reserved + self._reserve_of(req) <= self._most

    def admit(self, req: Req, match: Match) -> None:
        """Share the window at the end of a match with a choice that has just got its slot."""
        pages = [] if self.cache is None else self.cache.use_window(match.node)
        self.pool.hold(pages)
        first, size = match.count - len(pages), self._page_size
        branch = match.cached * size if match.cached > match.count else 0
        reserved = self._reserve_of(req)
        self.holdings[req] = _Holding(first, pages, first, match.count * size, branch, reserved)
        self.reserved += reserved

    def plan(self, rows: Sequence[Row], reqs: Sequence[Req]) -> list[PageUpdate]:
        """Give the rows of a plan the pages that they lack. Return the updates of page tables."""
        growing: dict[Req, int] = {}
        for row, req in zip(rows, reqs, strict=True):
            end = -(-(row.start + row.count) // self._page_size)
            if end > self.holdings[req].end:
                growing[req] = end
        self._make_room(sum(end - self.holdings[req].end for req, end in growing.items()))
        updates = []
        for req, end in growing.items():
            holding = self.holdings[req]
            holding.pages += self.pool.allocate(end - holding.end)
            first = max(holding.sent, holding.first)
            updates.append(PageUpdate(req.slot, first, [*self._unchanged, holding.pages[first - holding.first :]]))
            holding.sent = end
        return updates

    def on_step_committed(self, plan: Plan, reqs: Sequence[Req]) -> list[tuple[Req, int]]:
        """Note how far the choices of a plan have come. Rejected draft tokens do not count.

        Return choices to publish now, before the window that the cache lacks is freed, with the tokens to publish.
        """
        due = []
        for index, (row, req) in enumerate(zip(plan.rows, reqs, strict=True)):
            if (holding := self.holdings.get(req)) is None:
                continue
            last = row.start + row.count - 1  # computed again if the mask of its grammar was late
            holding.oldest = min(last, req.computed - 1) if index in plan.draft_tokens else last
            if 0 < holding.branch <= holding.oldest:
                due.append((req, holding.branch))
                holding.branch = 0
        return due

    def publish(self, req: Req, node: Node, end: int) -> None:
        """Share a choice's window pages with the cache: those of the path to `node`, which ends after `end` pages."""
        if self.cache is not None:
            holding = self.holdings[req]
            self.cache.add_window(node, end, holding.first, holding.pages)
            self._trim(holding)

    def release(self, req: Req) -> None:
        """Free all window pages of a choice that gives up its slot."""
        holding = self.holdings.pop(req)
        self.pool.release(holding.pages)
        self.reserved -= holding.reserved

    def _reserve_of(self, req: Req) -> int:
        return min(self._of_choice, -(-req.end // self._page_size))

    def _trim(self, holding: _Holding) -> None:
        """Release the pages before the window."""
        outside = max(0, holding.oldest - self.window + 1) // self._page_size - holding.first
        if outside > 0:
            self.pool.release(holding.pages[:outside])
            del holding.pages[:outside]
            holding.first += outside

    def _make_room(self, count: int) -> None:
        if count > len(self.pool.free_pages):
            for holding in self.holdings.values():
                self._trim(holding)
            while count > len(self.pool.free_pages) and self.cache is not None and self.cache.evict_window():
                pass
