"""Port of the prefix cache, and the implementation that caches nothing."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tercet.scheduler.core.pages import PageLists


class Node:
    """Run of tokens in the radix tree: the edge `key` from `parent`, and the pages that hold it.

    `key` is the int32 bytes of a whole number of pages. `locks` counts the choices that use this node or one below.
    """

    __slots__ = ("children", "key", "locks", "pages", "parent", "salt")

    def __init__(self, parent: "Node | None", key: bytes, pages: PageLists, salt: str) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.salt = salt
        self.children: dict[bytes, Node] = {}
        self.locks = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Longest cached prefix: its last node, and the number and ids of its pages."""

    node: Node
    count: int
    pages: PageLists


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
        """Return the number of cached pages of `key`, without side effects."""
        ...

    def match(self, salt: str, key: bytes) -> Match:
        """Return the longest cached prefix of `key`, in whole pages, and mark it as most recently used."""
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
        return Match(self._root, 0, [[] for _ in self._none])

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
