"""Radix cache of models with sliding windows: a prefix is usable as far as the pages of its last window exist.

Full layers need the pages of the whole prefix, layers with a window only those that the next token attends to. Each
edge has pages of the full group for all of its tokens, and of the window group for the last ones or for none. Window
pages are given up independently: first those before the last window of an edge, which only a prompt that branches off
there could use, then the others, least recently used edges first.
"""

from collections import OrderedDict
from collections.abc import Sequence

from tercet.scheduler.core.cache.page_pools import PagePool
from tercet.scheduler.core.cache.prefix_cache import Match, Node, RadixCache


class WindowRadixCache(RadixCache):
    """Radix cache whose nodes may have pages of the window group. The cache is one of the holders of such a page."""

    def __init__(self, page_size: int, groups: int, window: int, pool: PagePool) -> None:
        super().__init__(page_size, groups)
        self._pool = pool
        self._needed = max(1, -(-(window - 1) // page_size))
        """Pages that the first token after a page attends to."""
        self._long: OrderedDict[Node, None] = OrderedDict()
        """Nodes with more window pages than their last window has, least recently used first."""
        self._short: OrderedDict[Node, None] = OrderedDict()
        """Other nodes with window pages, least recently used first."""

    @property
    def with_window(self) -> list[Node]:
        """Nodes with window pages."""
        return [*self._long, *self._short]

    def measure(self, salt: str, key: bytes) -> int:
        """Return the number of pages of `key` that `match` would find, without side effects."""
        if salt not in self.roots:
            return 0
        node, position, inside = self._walk(salt, key)
        count = position // self._stride
        if inside:
            shared = self._shared(node, key, position) // self._stride
            return self._usable(node, count + shared, shared)[1]
        return self._usable(node, count, len(node.pages[0]))[1]

    def match(self, salt: str, key: bytes) -> Match:
        """Return the longest cached prefix of `key` whose last window is cached, too."""
        last, position = self._descend(salt, key)
        cached = position // self._stride
        node, count = self._usable(last, cached, len(last.pages[0]))
        return Match(node, count, self.pages_of(node), cached)

    def use_window(self, node: Node) -> list[int]:
        """Return the pages of the window at the end of a matched node, and mark them as most recently used."""
        runs: list[list[int]] = []
        missing = self._needed
        while missing > 0 and node.parent is not None:
            self._order_of(node).move_to_end(node)
            runs.append(node.window[-missing:])
            missing -= len(runs[-1])
            node = node.parent
        return [page for run in reversed(runs) for page in run]

    def add_window(self, node: Node, end: int, first: int, pages: Sequence[int]) -> None:
        """Add window pages to the nodes that lack them, up from `node`, which ends after `end` pages.

        `pages` are those with the indices `first, first + 1, ...` and reach `end`. The cache becomes a holder of those
        that it takes.
        """
        while node.parent is not None and end > first:
            begin = end - len(node.pages[0])
            lacking = pages[max(begin - first, 0) : max(end - len(node.window) - first, 0)]
            if lacking:
                self._pool.hold(lacking)
                self._version += 1
                self._set_window(node, [*lacking, *node.window])
            self._order_of(node).move_to_end(node)
            end = begin
            node = node.parent

    def evict_window(self) -> bool:
        """Give up window pages of one node: those before its last window, if any node has such. Return False if none.

        Pages that a running choice also holds do not become free.
        """
        for node in self._long or self._short:
            count = max(len(node.window) - self._needed, 0) or len(node.window)
            self._pool.release(node.window[:count])
            self._version += 1
            self._set_window(node, node.window[count:])
            return True
        return False

    def _order_of(self, node: Node) -> OrderedDict[Node, None]:
        return self._long if len(node.window) > self._needed else self._short

    def _set_window(self, node: Node, window: list[int]) -> None:
        """Replace a node's window pages. It becomes the most recently used in another order."""
        before = self._order_of(node)
        node.window = window
        after = self._order_of(node)
        if after is not before or not window:
            before.pop(node, None)
        if window:
            after.setdefault(node)

    def _usable(self, node: Node, count: int, size: int) -> tuple[Node, int]:
        """Return the last node whose window is cached, from the root to `node`, and its end, in pages.

        `count` pages end with the first `size` pages of the edge of `node`.
        """
        usable, end, covered = node, count, 0
        while node.parent is not None:
            own = max(0, size - len(node.pages[0]) + len(node.window))
            covered += own
            if covered >= self._needed:
                break
            if own < size:
                usable, end, covered = node.parent, count - size, 0
            count -= size
            node = node.parent
            size = len(node.pages[0])
        return usable, end

    def _split(self, node: Node, at: int) -> Node:
        window = node.window
        upper = super()._split(node, at)
        kept = min(len(window), len(node.pages[0]))
        self._set_window(node, window[len(window) - kept :])
        self._set_window(upper, window[: len(window) - kept])
        return upper

    def _cut(self, leaf: Node, kept: int) -> None:
        """Give up the window pages of an edge after its first `kept` pages."""
        count = max(0, len(leaf.window) - len(leaf.pages[0]) + kept)
        if leaf.window:
            self._pool.release(leaf.window[count:])
            self._version += 1
            self._set_window(leaf, leaf.window[:count])
