"""The port to a cache of computed prefixes, and the cache that keeps nothing."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tercet.scheduler.core.pages import PageLists


class Node:
    """A run of tokens in the radix tree: the edge `key` from `parent`, and the pages that hold it.

    `key` is the int32 bytes of a whole number of pages. `locks` counts the requests that use this node or one below.
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
    """The longest cached prefix: its last node, how many pages it spans, and which."""

    node: Node
    count: int
    pages: PageLists


class Inserted(NamedTuple):
    """`existing` leading pages were cached already; the cache now holds the caller's pages after them."""

    node: Node
    existing: int


class PrefixCache(Protocol):
    """Maps token prefixes to pages. Token keys are int32 bytes; `salt` separates namespaces."""

    @property
    def evictable(self) -> int:
        """Pages (in every group) that `evict` could free now."""
        ...

    @property
    def cached(self) -> int:
        """Pages the cache holds, used or not."""
        ...

    @property
    def version(self) -> int:
        """Another number whenever `measure` may answer otherwise than before."""
        ...

    def measure(self, salt: str, key: bytes) -> int:
        """Pages of `key` that are cached; changes nothing."""
        ...

    def match(self, salt: str, key: bytes) -> Match:
        """The longest cached prefix of `key`, in whole pages, now most recently used."""
        ...

    def upcoming(self, salt: str, key: bytes, most: int) -> bytes:
        """Up to `most` tokens that followed the whole of `key` in a cached prefix; changes nothing."""
        ...

    def lock(self, node: Node) -> None:
        """Keep a node and all above it from eviction until `unlock`."""
        ...

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        ...

    def insert(self, salt: str, key: bytes, pages: PageLists) -> Inserted:
        """Hand over the caller's hold on the pages of `key` that were not cached before."""
        ...

    def evict(self, count: int) -> PageLists:
        """Forget least recently used prefixes until `count` pages are handed back, or nothing evictable is left."""
        ...


class ChunkCache:
    """No reuse between requests: every prefix is computed again (`--disable-radix-cache`)."""

    def __init__(self, groups: int) -> None:
        self._none: PageLists = [[] for _ in range(groups)]
        self._root = Node(None, b"", self._none, "")

    evictable = 0
    cached = 0
    version = 0

    def measure(self, salt: str, key: bytes) -> int:  # noqa: ARG002
        """Nothing is ever cached."""
        return 0

    def match(self, salt: str, key: bytes) -> Match:  # noqa: ARG002
        """The empty prefix."""
        return Match(self._root, 0, [[] for _ in self._none])

    def upcoming(self, salt: str, key: bytes, most: int) -> bytes:  # noqa: ARG002
        """Nothing is known."""
        return b""

    def lock(self, node: Node) -> None:
        """Nothing to keep."""

    def unlock(self, node: Node) -> None:
        """Nothing to let go."""

    def insert(self, salt: str, key: bytes, pages: PageLists) -> Inserted:  # noqa: ARG002
        """Takes no page: all count as existing, so that the caller releases its own."""
        return Inserted(self._root, len(pages[0]))

    def evict(self, count: int) -> PageLists:  # noqa: ARG002
        """Nothing to forget."""
        return [[] for _ in self._none]
