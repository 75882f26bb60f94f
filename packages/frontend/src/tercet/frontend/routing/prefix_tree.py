"""Radix tree over the prompts sent to a scheduler, an estimate of its prefix cache."""

import heapq
import itertools

TOKEN = 4
"""Bytes of a token id in an int32 buffer."""


class _Node:
    """Tree node: a run of tokens that follows those of its parents."""

    __slots__ = ("children", "edge", "parent", "used")

    def __init__(self, edge: bytes, parent: "_Node | None", used: int) -> None:
        self.edge = edge
        self.parent = parent
        self.used = used
        self.children: dict[bytes, _Node] = {}
        """Keyed by the first token."""


class PrefixTree:
    """LRU radix tree of at most `capacity` tokens; the least recently used leaves are evicted first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._roots: dict[str, _Node] = {}
        """Keyed by salt: requests with different salts share no cache entries."""
        self._ticks = itertools.count()
        self._leaves: list[tuple[int, int, str, _Node]] = []
        """Heap of (last use, tick, salt, leaf). Entries are stale, and skipped, if the leaf was used again."""
        self._leaf_count = 0
        self.tokens = 0

    def match(self, salt: str, ids: bytes) -> int:
        """Return the number of leading tokens of an int32 buffer that are in the tree."""
        node, at = self._roots.get(salt), 0
        while node is not None and at < len(ids):
            node = node.children.get(ids[at : at + TOKEN])
            if node is None:
                break
            shared = _common_prefix(node.edge, ids, at)
            at += shared
            if shared < len(node.edge):
                break
        return at // TOKEN

    def insert(self, salt: str, ids: bytes) -> None:
        """Add the tokens of a prompt and mark their path as just used."""
        ids = ids[: self._capacity * TOKEN]
        if not ids:
            return
        now, at = next(self._ticks), 0
        node = self._roots.get(salt)
        if node is None:
            node = self._roots[salt] = _Node(b"", None, now)
        while at < len(ids):
            child = node.children.get(ids[at : at + TOKEN])
            if child is None:
                self._leaf_count += bool(node.children) or node.parent is None
                child = node.children[ids[at : at + TOKEN]] = _Node(ids[at:], node, now)
                self.tokens += len(child.edge) // TOKEN
                at = len(ids)
            else:
                shared = _common_prefix(child.edge, ids, at)
                if shared < len(child.edge):
                    child = _split(node, child, shared)
                at += shared
            child.used = now
            node = child
        if not node.children:
            heapq.heappush(self._leaves, (now, next(self._ticks), salt, node))
        self._evict()

    def _evict(self) -> None:
        while self.tokens > self._capacity:
            used, _, salt, node = heapq.heappop(self._leaves)
            if node.used == used and not node.children and node.parent is not None:
                self._remove_leaf(salt, node)
        if len(self._leaves) > 2 * self._leaf_count + 64:
            self._leaves = [entry for entry in self._leaves if _is_valid(entry)]
            heapq.heapify(self._leaves)

    def _remove_leaf(self, salt: str, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge[:TOKEN]]
        leaf.parent = None
        self.tokens -= len(leaf.edge) // TOKEN
        if parent.children:
            self._leaf_count -= 1
        elif parent.parent is not None:
            heapq.heappush(self._leaves, (parent.used, next(self._ticks), salt, parent))
        else:
            self._leaf_count -= 1
            del self._roots[salt]


def _is_valid(entry: tuple[int, int, str, _Node]) -> bool:
    used, _, _, node = entry
    return node.used == used and not node.children and node.parent is not None


def _split(parent: _Node, child: _Node, at: int) -> _Node:
    """Split an edge and return the new node in the middle."""
    middle = _Node(child.edge[:at], parent, child.used)
    parent.children[middle.edge[:TOKEN]] = middle
    child.edge, child.parent = child.edge[at:], middle
    middle.children[child.edge[:TOKEN]] = child
    return middle


def _common_prefix(edge: bytes, ids: bytes, at: int) -> int:
    """Return the number of bytes of whole tokens that an edge and a buffer from `at` on share: at least one token."""
    most = min(len(edge), len(ids) - at) // TOKEN
    if edge[: most * TOKEN] == ids[at : at + most * TOKEN]:
        return most * TOKEN
    low, high = 1, most  # invariant: the first `low` tokens are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low * TOKEN : middle * TOKEN] == ids[at + low * TOKEN : at + middle * TOKEN]:
            low = middle
        else:
            high = middle
    return low * TOKEN
