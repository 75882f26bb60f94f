"""Prefix cache: its port, the radix tree, and the implementation that caches nothing.

The radix tree is over token ids at page granularity (after SGLang's RadixAttention, arXiv:2312.07104). Keys are int32
bytes, so that an edge of any length is compared with one `memcmp` (`bytes.startswith`) and a child is found by the
bytes of its first page. Each salt has a tree of its own.

Eviction order costs nothing to maintain: `_unlocked` lists every node that no choice uses, least recently used first,
and a use moves the nodes of its path to the end *deepest first*. A node is therefore always younger than its children,
and the oldest one is always a leaf.
"""

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from tercet.protocol.messages.internal_state import PrefixRow
from tercet.scheduler.core.cache.tree_changes import BlocksRemoved, BlocksStored, TreeObserver

PageLists = list[list[int]]
"""Page ids, one list for each cache group."""
_FEW = 64
"""Maximum edges of a node that are searched for one that begins with less than a page."""
_CUTS = 64
"""Approximate maximum number of pieces in which a long leaf is evicted."""

_MAX_ROWS = 128
"""Maximum number of nodes that `RadixCache.largest` describes."""
_MAX_SEARCHED = 1024
"""Maximum number of nodes that it looks at."""


class Node:
    """Run of tokens in the radix tree: the edge `key` from `parent`, and the pages that hold it.

    `key` is the int32 bytes of a whole number of pages. `locks` counts the choices that use this node or one below.
    `snapshot` is that of the recurrent state at the end of the edge; -1 for none. `window` has the last pages of the
    edge, as many as are cached, in the group of layers with a sliding window. `first` is the number of its first block,
    as in `tree_changes`.
    """

    __slots__ = ("children", "first", "key", "locks", "pages", "parent", "salt", "snapshot", "window")

    def __init__(self, parent: "Node | None", key: bytes, pages: PageLists, salt: str, first: int = 0) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.snapshot = -1
        self.window: list[int] = []
        self.first = first


@dataclass(frozen=True, slots=True)
class Match:
    """Longest prefix that can be used: its last node, and the number and ids of its pages."""

    node: Node
    count: int
    pages: PageLists
    cached: int
    """Number of cached pages, which is larger if some of them lack a snapshot or the pages of their window."""


class Inserted(NamedTuple):
    """Result of an insertion.

    `existing` leading pages were already cached; the cache now holds the caller's after them.
    """

    node: Node
    existing: int


class PrefixCache(Protocol):
    """Map of token prefixes to pages. Token keys are int32 bytes; `salt` separates namespaces."""

    @property
    def evictable(self) -> int:
        """Pages (in every group) that `evict` could free now."""
        ...

    @property
    def cached(self) -> int:
        """Pages that the cache holds, in use or not."""
        ...

    @property
    def version(self) -> int:
        """Number that changes whenever the result of `measure` may change."""
        ...

    def measure(self, salt: str, key: bytes) -> int:
        """Return the number of pages of `key` that `match` would find, without side effects."""
        ...

    def match(self, salt: str, key: bytes) -> Match:
        """Return the longest usable prefix of `key`, in whole pages, and mark it as most recently used."""
        ...

    def pages_of(self, node: Node) -> PageLists:
        """Return all pages from the root down to a node."""
        ...

    def upcoming(self, salt: str, key: bytes, most: int) -> bytes:
        """Return up to `most` tokens that followed the whole of `key` in a cached prefix, without side effects."""
        ...

    def lock(self, node: Node) -> None:
        """Protect a node and all above it from eviction until `unlock`."""
        ...

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        ...

    def insert(self, salt: str, key: bytes, pages: PageLists) -> Inserted:
        """Add `key`. The cache takes over the caller's hold on the pages that were not cached before."""
        ...

    def evict(self, count: int) -> PageLists:
        """Evict least recently used prefixes until `count` pages are returned, or nothing evictable is left."""
        ...

    def largest(self) -> list[PrefixRow]:
        """Describe the largest nodes, parents first, without side effects."""
        ...


class ChunkCache:
    """Cache without reuse between requests: every prefix is computed again (`--disable-radix-cache`)."""

    def __init__(self, groups: int) -> None:
        self._none: PageLists = [[] for _ in range(groups)]
        self._root = Node(None, b"", self._none, "")

    evictable = 0
    cached = 0
    version = 0

    def measure(self, salt: str, key: bytes) -> int:  # noqa: ARG002
        return 0

    def match(self, salt: str, key: bytes) -> Match:  # noqa: ARG002
        """Return the empty prefix."""
        return Match(self._root, 0, [[] for _ in self._none], 0)

    def pages_of(self, node: Node) -> PageLists:  # noqa: ARG002
        return [[] for _ in self._none]

    def upcoming(self, salt: str, key: bytes, most: int) -> bytes:  # noqa: ARG002
        return b""

    def lock(self, node: Node) -> None:
        pass

    def unlock(self, node: Node) -> None:
        pass

    def insert(self, salt: str, key: bytes, pages: PageLists) -> Inserted:  # noqa: ARG002
        """Take no page: all count as existing, so that the caller releases its own."""
        return Inserted(self._root, len(pages[0]))

    def evict(self, count: int) -> PageLists:  # noqa: ARG002
        return [[] for _ in self._none]

    def largest(self) -> list[PrefixRow]:
        return []


class RadixCache:
    """Prefix cache. The tree holds every page in it once. It never frees a page itself: `evict` returns them."""

    def __init__(self, page_size: int, groups: int = 1) -> None:
        self._stride = 4 * page_size
        """Bytes of key in a page."""
        self._groups = groups
        self.roots: dict[str, Node] = {}
        self._unlocked: OrderedDict[Node, None] = OrderedDict()
        self._cached = 0
        self._evictable = 0
        self._version = 0
        self._blocks = 0
        """Blocks stored since the start."""
        self.observer: TreeObserver | None = None
        """Called with each change of the tree."""

    @property
    def evictable(self) -> int:
        """Pages of nodes that no choice uses."""
        return self._evictable

    @property
    def cached(self) -> int:
        """Pages in all trees."""
        return self._cached

    @property
    def version(self) -> int:
        """Number that changes whenever the result of `measure` may change."""
        return self._version

    @property
    def unlocked(self) -> list[Node]:
        """Nodes that no choice uses, in eviction order."""
        return list(self._unlocked)

    def measure(self, salt: str, key: bytes) -> int:
        """Return the number of cached pages of `key`, without side effects."""
        if salt not in self.roots:
            return 0
        node, position, inside = self._walk(salt, key)
        return (position + (self._shared(node, key, position) if inside else 0)) // self._stride

    def match(self, salt: str, key: bytes) -> Match:
        """Return the longest cached prefix of `key`, in whole pages; an edge that matches in part is split."""
        node, position = self._descend(salt, key)
        return Match(node, position // self._stride, self.pages_of(node), position // self._stride)

    def upcoming(self, salt: str, key: bytes, most: int) -> bytes:
        """Return up to `most` tokens that followed the whole of `key`, in the last cached of a few prefixes."""
        if salt not in self.roots:
            return b""
        node, position, inside = self._walk(salt, key)
        rest = key[position:]
        if not inside and len(rest) >= self._stride:
            return b""
        for edge in [node] if inside else islice(reversed(node.children.values()), _FEW):
            if edge.key.startswith(rest) and len(edge.key) > len(rest):
                return edge.key[len(rest) : len(rest) + 4 * most]
        return b""

    def lock(self, node: Node) -> None:
        """Protect a node and all above it from eviction."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if at.locks == 0:
                del self._unlocked[at]
                self._evictable -= len(at.pages[0])
            at.locks += 1
            at = at.parent
        if at is not None:
            at.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`; nodes without users become evictable, as the most recently used."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            at.locks -= 1
            if at.locks == 0:
                self._unlocked[at] = None
                self._evictable += len(at.pages[0])
            at = at.parent
        if at is not None:
            at.locks -= 1
            self._drop_root(at)

    def insert(self, salt: str, key: bytes, pages: PageLists) -> Inserted:
        """Add `key` (whole pages); the tree takes over the hold on the pages it did not have."""
        node, start = self._descend(salt, key)
        existing = start // self._stride
        if start < len(key):
            pages = [group[existing : len(key) // self._stride] for group in pages]
            leaf = Node(node, key[start:], pages, salt, self._blocks)
            self._blocks += len(leaf.key) // self._stride
            node.children[leaf.key[: self._stride]] = leaf
            self._unlocked[leaf] = None
            self._cached += len(leaf.pages[0])
            self._evictable += len(leaf.pages[0])
            self._touch(leaf)
            self._version += 1
            if self.observer is not None:
                parent = node.first + len(node.key) // self._stride - 1
                self.observer(BlocksStored(salt, parent, leaf.first, leaf.key))
            node = leaf
        return Inserted(node, existing)

    def evict(self, count: int) -> PageLists:
        """Drop least recently used leaves until `count` pages are returned, or nothing evictable is left.

        The last leaf is cut, not dropped, if part of it is enough. A long leaf is cut by more than requested: pages are
        often requested one by one, and each cut copies the rest.
        """
        freed: PageLists = [[] for _ in range(self._groups)]
        self._version += count > 0
        while count > 0 and self._unlocked:
            leaf = next(iter(self._unlocked))
            size = len(leaf.pages[0])
            cut = min(max(count, size // _CUTS), size)
            for pages, group in zip(leaf.pages, freed, strict=True):
                group.extend(pages[size - cut :])
            count -= cut
            self._cached -= cut
            self._evictable -= cut
            self._cut(leaf, size - cut)
            if self.observer is not None:
                self.observer(BlocksRemoved(leaf.first + size - cut, cut))
            if cut == size:
                self._remove(leaf)
            else:
                leaf.key = leaf.key[: (size - cut) * self._stride]
                leaf.pages = [pages[: size - cut] for pages in leaf.pages]
        return freed

    def largest(self) -> list[PrefixRow]:
        """Describe nodes from the roots down, the largest known one next. The latest children are looked at first."""
        rows: list[PrefixRow] = []
        known: list[tuple[int, int, int, Node]] = []  # (-pages, tie break, row of the parent, node)
        searched = 0
        parents = [(-1, root) for root in islice(reversed(self.roots.values()), _MAX_SEARCHED)]
        while True:
            for row, parent in parents:
                for child in islice(reversed(parent.children.values()), _MAX_SEARCHED - searched):
                    searched += 1
                    heapq.heappush(known, (-len(child.pages[0]), searched, row, child))
            if not known or len(rows) == _MAX_ROWS:
                return rows
            pages, _, row, node = heapq.heappop(known)
            rows.append(PrefixRow(parent=row, pages=-pages, users=node.locks, children=len(node.children)))
            parents = [(len(rows) - 1, node)]

    def _descend(self, salt: str, key: bytes) -> tuple[Node, int]:
        """Return the last node of the longest cached prefix of `key`, and its bytes.

        Splits an edge that matches in part, and makes the path the most recently used.
        """
        node, position, inside = self._walk(salt, key)
        if inside:
            shared = self._shared(node, key, position)
            node = self._split(node, shared)
            position += shared
        self._touch(node)
        return node, position

    def _walk(self, salt: str, key: bytes) -> tuple[Node, int, bool]:
        """Follow whole edges while they match.

        Returns (node, bytes matched before it, whether the match ends inside its edge).
        """
        stride = self._stride
        node = self.roots.get(salt)
        if node is None:
            node = self.roots[salt] = Node(None, b"", [[] for _ in range(self._groups)], salt)
        position, end = 0, len(key) - len(key) % stride
        while position < end:
            child = node.children.get(key[position : position + stride])
            if child is None:
                break
            if not key.startswith(child.key, position):
                return child, position, True
            position += len(child.key)
            node = child
        return node, position, False

    def _shared(self, node: Node, key: bytes, position: int) -> int:
        """Return the bytes of whole pages that the edge of `node` shares with `key` from `position`.

        A binary search of memcmps: each compares only bytes that the ones before it have not, so that all together copy
        and compare the edge once or twice.
        """
        stride, edge = self._stride, node.key
        low, high = 1, min(len(edge), len(key) - position) // stride
        while low < high:
            middle = (low + high + 1) // 2
            if key.startswith(edge[low * stride : middle * stride], position + low * stride):
                low = middle
            else:
                high = middle - 1
        return low * self._stride

    def _split(self, node: Node, at: int) -> Node:
        """Cut the edge of `node` after `at` bytes; return the new upper node."""
        parent = node.parent
        if parent is None:
            raise ValueError("a root has no edge to split")
        count = at // self._stride
        upper = Node(parent, node.key[:at], [pages[:count] for pages in node.pages], node.salt, node.first)
        upper.locks = node.locks
        parent.children[upper.key[: self._stride]] = upper
        node.parent, node.key, node.first = upper, node.key[at:], node.first + count
        node.pages = [pages[count:] for pages in node.pages]
        upper.children[node.key[: self._stride]] = node
        if not upper.locks:
            self._unlocked[upper] = None
            self._touch(upper)
        return upper

    def _touch(self, node: Node) -> None:
        """Make the path to `node` the most recently used, deepest first."""
        at: Node | None = node
        while at is not None and at.parent is not None:
            if not at.locks:
                self._unlocked.move_to_end(at)
            at = at.parent

    def pages_of(self, node: Node) -> PageLists:
        """Return all pages from the root down to a node."""
        path = []
        at: Node | None = node
        while at is not None and at.parent is not None:
            path.append(at)
            at = at.parent
        path.reverse()
        pages: PageLists = [[] for _ in range(self._groups)]
        for step in path:
            for group, own in zip(pages, step.pages, strict=True):
                group.extend(own)
        return pages

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None or leaf.children:
            raise ValueError("only a leaf can be evicted")
        del parent.children[leaf.key[: self._stride]]
        del self._unlocked[leaf]
        self._drop_root(parent)

    def _cut(self, leaf: Node, kept: int) -> None:
        """Free the snapshot and window pages of an edge that is cut to `kept` pages, or removed."""

    def _drop_root(self, node: Node) -> None:
        """Remove an empty tree, so that salts use no memory once their prefixes are gone."""
        if node.parent is None and not node.children and not node.locks:
            self.roots.pop(node.salt, None)
