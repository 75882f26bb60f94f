"""Radix cache of models with recurrent state: a prefix is usable as far as a snapshot of the state exists.

Keys and values of any prefix of a cached text are there, but a state covers exactly the tokens that made it. Snapshots
lie at the ends of edges, and an edge is split where one is attached. Sources: Marconi (arXiv 2411.19379) for snapshots
in a radix tree.
"""

from collections import OrderedDict
from collections.abc import Callable

from tercet.scheduler.core.cache.prefix_cache import Match, Node, RadixCache


class StateRadixCache(RadixCache):
    """Radix cache whose nodes may have a snapshot. `free` gets the snapshots that it gives up."""

    def __init__(self, page_size: int, groups: int, free: Callable[[int], None]) -> None:
        super().__init__(page_size, groups)
        self._free = free
        self._with_snapshot: OrderedDict[Node, None] = OrderedDict()
        """Nodes with a snapshot, least recently used first."""

    @property
    def snapshot_count(self) -> int:
        """Number of snapshots in all trees."""
        return len(self._with_snapshot)

    def measure(self, salt: str, key: bytes) -> int:
        """Return the number of pages before the last snapshot of `key`, without side effects."""
        if salt not in self.roots:
            return 0
        node, position, inside = self._walk(salt, key)
        if inside and node.parent is not None:
            node = node.parent
        return self._usable(node, position // self._stride)[1]

    def match(self, salt: str, key: bytes) -> Match:
        """Return the longest cached prefix of `key` that ends with a snapshot."""
        last, position = self._descend(salt, key)
        cached = position // self._stride
        node, count = self._usable(last, cached)
        if node.snapshot >= 0:
            self._with_snapshot.move_to_end(node)
        return Match(node, count, self.pages_of(node), cached)

    def attach(self, salt: str, key: bytes, snapshot: int) -> bool:
        """Add the snapshot after `key`, whole pages. Return False if they are not cached or have a snapshot."""
        node, position = self._descend(salt, key)
        if position < len(key):
            return False
        if node.snapshot >= 0:
            self._with_snapshot.move_to_end(node)
            return False
        node.snapshot = snapshot
        self._with_snapshot[node] = None
        self._version += 1
        return True

    def evict_snapshot(self) -> bool:
        """Give up the least recently used snapshot. Return False if the cache has no snapshot."""
        if not self._with_snapshot:
            return False
        self._drop_snapshot(next(iter(self._with_snapshot)))
        return True

    def _usable(self, node: Node, count: int) -> tuple[Node, int]:
        """Return the last node with a snapshot from the root to `node`, which ends after `count` pages, and its end."""
        while node.parent is not None and node.snapshot < 0:
            count -= len(node.pages[0])
            node = node.parent
        return node, count

    def _cut(self, leaf: Node, kept: int) -> None:  # noqa: ARG002
        self._drop_snapshot(leaf)

    def _drop_snapshot(self, node: Node) -> None:
        if node.snapshot >= 0:
            del self._with_snapshot[node]
            self._version += 1
            self._free(node.snapshot)
            node.snapshot = -1
