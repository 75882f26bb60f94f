"""Stop strings in a growing text, by an Aho-Corasick automaton that reads each character once.

The node reached after a character is the longest suffix of the text that begins a stop string, and its depth is exactly
the number of characters to hold back. (Aho, Corasick: "Efficient string matching", 1975.)
"""

from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(slots=True)
class _Node:
    depth: int
    next: dict[str, "_Node"] = field(default_factory=dict)
    fail: "_Node | None" = None
    match: str | None = None
    """Longest stop string that ends here."""


class StopStrings:
    """Automaton of one set of stop strings, shared by the choices of a request. Empty strings are ignored."""

    def __init__(self, stops: list[str]) -> None:
        self.root = _Node(0)
        self.first_chars = frozenset(stop[0] for stop in stops if stop)
        """First characters of the stop strings; a text without any of them cannot match."""
        for stop in stops:
            node = self.root
            for char in stop:
                following = node.next.get(char)
                if following is None:
                    following = node.next[char] = _Node(node.depth + 1)
                node = following
            node.match = stop or None
        self._link()

    def _link(self) -> None:
        """Link every node to its longest proper suffix, breadth first, so shorter ones are linked already."""
        level = [self.root]
        while level:
            deeper = []
            for parent in level:
                for char, node in parent.next.items():
                    node.fail = _step(parent.fail, char, self.root) if parent.fail else self.root
                    node.match = node.match or node.fail.match
                    deeper.append(node)
            level = deeper


@lru_cache(maxsize=16)
def stop_strings(stops: tuple[str, ...]) -> StopStrings:
    """Return the automaton of these stop strings, built once for requests that repeat them."""
    return StopStrings(list(stops))


def _step(node: _Node, char: str, root: _Node) -> _Node:
    """Return the node after one more character."""
    while (following := node.next.get(char)) is None:
        if node.fail is None:
            return root
        node = node.fail
    return following


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be shown now, and the stop string that ended it, if any."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Position of one choice in the automaton, with the text that could still become a stop string.

    The first stop string to end wins; of several that end at the same character, the longest.
    """

    __slots__ = ("_held", "_include", "_node", "_stops")

    def __init__(self, stops: StopStrings, include_stop: bool = False) -> None:
        self._stops = stops
        self._include = include_stop
        self._node = stops.root
        self._held = ""

    def feed(self, text: str, *, may_end: bool = True) -> StopResult:
        """Append text; feed nothing after a match. If not `may_end`, stop strings that end in it are plain text."""
        node, root = self._node, self._stops.root
        if node is root and self._stops.first_chars.isdisjoint(text):
            return StopResult(text)
        for count, char in enumerate(text, 1):
            node = _step(node, char, root)
            if node.match is not None and may_end:
                whole = self._held + text[:count]
                self._held, self._node = "", root
                return StopResult(whole if self._include else whole[: -len(node.match)], node.match)
        self._node = node
        whole = self._held + text
        cut = len(whole) - node.depth
        self._held = whole[cut:]
        return StopResult(whole[:cut])

    def flush(self) -> str:
        """Return the text held back for a stop string that did not come."""
        text, self._held, self._node = self._held, "", self._stops.root
        return text

    @property
    def idle(self) -> bool:
        """True if no text is held back: text without any of `StopStrings.first_chars` then needs no matching."""
        return not self._held
