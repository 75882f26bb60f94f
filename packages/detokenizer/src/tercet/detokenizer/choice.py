"""State of one choice, from its first token to its last: ids in; text, stop strings and the finish out.

Stop strings are found by an Aho-Corasick automaton that reads each character once. The node reached after a character
is the longest suffix of the text that begins a stop string, and its depth is exactly the number of characters to hold
back. (Aho, Corasick: "Efficient string matching", 1975.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from tercet.detokenizer.decode_status import TextStream, text_stream
from tercet.detokenizer.errors import SpecError
from tercet.detokenizer.vocabulary import PieceTable, Vocabulary
from tercet.protocol.errors import DecodeError
from tercet.protocol.messages.codec import decode_spec
from tercet.protocol.messages.values import FinishReason, FinishType, unpack_ints

MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Characters of all stop strings of a request together."""
MAX_PROMPT_TAIL = 1024


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


class DecodePlan:
    """Validated DecodeSpec of a request, with the data that its choices share."""

    def __init__(self, spec: bytes) -> None:
        """Decode and check the spec, which two processes have forwarded unread. Raises SpecError."""
        try:
            self.spec = decode_spec(spec)
            self.prompt_tail = list(unpack_ints(self.spec.prompt_tail))
            self.resume = {entry.index: list(unpack_ints(entry.output_ids)) for entry in self.spec.resume}
        except (DecodeError, ValueError) as error:
            raise SpecError(f"the decode spec cannot be read: {error}") from error
        if len(self.spec.stop) > MAX_STOPS or sum(map(len, self.spec.stop)) > MAX_STOP_CHARS:
            raise SpecError(f"more than {MAX_STOPS} stop strings, or more than {MAX_STOP_CHARS} characters of them")
        if len(self.prompt_tail) > MAX_PROMPT_TAIL:
            raise SpecError(f"a prompt tail of more than {MAX_PROMPT_TAIL} ids")
        self.stops = stop_strings(tuple(self.spec.stop)) if any(self.spec.stop) else None


@dataclass(frozen=True, slots=True)
class DecodedRow:
    """Text of one row, the number of its ids that count, and the finish if the choice ends."""

    text: str
    count: int
    finish: FinishReason | None


@dataclass(frozen=True, slots=True)
class ReplyRoute:
    """Identity of a choice, the scheduler that sends its ids and the frontend that gets its text."""

    rid: str
    index: int
    attempt: int
    frontend: str
    scheduler: str


class Choice:
    """State of one choice. A resumed one has decoded its earlier ids and continues after the characters sent."""

    __slots__ = (
        "_chars_to_skip",
        "_excluded_ids",
        "_finish",
        "_include_stop",
        "_min_tokens",
        "_status",
        "_stops",
        "_unsent_text",
        "attempt",
        "last_batch",
        "next",
        "piece_table",
        "route",
        "stop_first_chars",
    )

    def __init__(self, route: ReplyRoute, plan: DecodePlan, vocabulary: Vocabulary) -> None:
        spec = plan.spec
        self.route = route
        self.attempt = route.attempt
        self.next = 0
        """Position of the next id."""
        self.last_batch = 0
        """Number of the last batch with a row of this choice."""
        self._status: TextStream = text_stream(vocabulary, spec.skip_special_tokens, plan.prompt_tail)
        self._stops = StopMatcher(plan.stops, spec.include_stop) if plan.stops else None
        self._include_stop = spec.include_stop
        self._min_tokens = spec.min_tokens
        self._excluded_ids = frozenset[int]() if spec.stops_in_special_tokens else vocabulary.special_ids
        """Ids whose text is not searched for stop strings."""
        self._finish: FinishReason | None = None
        self._unsent_text = ""
        """Text of earlier ids that the client does not have yet."""
        self._chars_to_skip = 0
        """Characters to come that the client already has."""
        self.piece_table: PieceTable | None = None
        """If set, a text piece of this table without a character of `stop_first_chars` may be appended without
        `step`."""
        self.stop_first_chars = plan.stops.first_chars if plan.stops else frozenset()
        if earlier := plan.resume.get(route.index):
            self._replay(earlier, spec.chars_sent.get(route.index, 0))
        self._update_piece_table()

    def _replay(self, earlier: list[int], chars_sent: int) -> None:
        replayed = self._decode(earlier)
        self.next, self._finish = replayed.count, replayed.finish
        self._unsent_text = replayed.text[max(chars_sent, 0) :]
        self._chars_to_skip = max(chars_sent - len(replayed.text), 0)

    def step(self, token_id: int) -> str | None:
        """Return the text of one more id if it depends on the stream only; else None, and `append` is needed.

        This is the short way for the hot path, in which the caller advances `next`.
        """
        if self._stops or self._unsent_text or self._chars_to_skip or self._finish:
            return None
        text = self._status.push(token_id)
        self.piece_table = self._status.piece_table
        return text

    def append(self, ids: Sequence[int], finish: FinishReason | None) -> DecodedRow:
        """Decode the next ids, in order. A stop string overrides `finish` and ends the choice at its last id."""
        if self._finish is not None:  # an earlier attempt's ids already held a stop string
            return DecodedRow(self._unsent_part(""), 0, self._finish)
        decoded = self._decode(ids, finish)
        self.next += decoded.count
        decoded = DecodedRow(self._unsent_part(decoded.text), decoded.count, decoded.finish)
        self._update_piece_table()
        return decoded

    def _decode(self, ids: Sequence[int], finish: FinishReason | None = None) -> DecodedRow:
        """Decode ids; hold back text that could become a stop string, unless the choice finishes."""
        silent = len(ids) if self._ends_on_stop_token(ids, finish) else 0
        texts = []
        for count, token_id in enumerate(ids, 1):
            text = "" if count == silent else self._status.push(token_id)
            if self._stops and token_id in self._excluded_ids:
                text = self._stops.flush() + text
            elif self._stops and text:
                fed = self._stops.feed(text, may_end=self.next + count >= self._min_tokens)
                text = fed.text
                if fed.matched is not None:
                    texts.append(text)
                    return DecodedRow("".join(texts), count, FinishReason(FinishType.STOP, fed.matched))
            texts.append(text)
        if finish is not None:
            text, finish = self._flush(finish, self.next + len(ids))
            texts.append(text)
        return DecodedRow("".join(texts), len(ids), finish)

    def _ends_on_stop_token(self, ids: Sequence[int], finish: FinishReason | None) -> bool:
        """Return whether the last id is a stop token, whose text is shown only if stop strings are."""
        return (
            finish is not None
            and not self._include_stop
            and finish.type is FinishType.STOP
            and len(ids) > 0
            and finish.matched == ids[-1]
        )

    def _flush(self, finish: FinishReason, tokens: int) -> tuple[str, FinishReason]:
        """Return the text held back after `tokens` tokens, and the finish, which may be a stop string in that text."""
        text = self._status.flush()
        if self._stops is None:
            return text, finish
        fed = self._stops.feed(text, may_end=tokens >= self._min_tokens)
        if fed.matched is not None:
            return fed.text, FinishReason(FinishType.STOP, fed.matched)
        return fed.text + self._stops.flush(), finish

    def _unsent_part(self, text: str) -> str:
        """Return the part of new text that the client lacks."""
        lacking = self._unsent_text + text[self._chars_to_skip :]
        self._unsent_text, self._chars_to_skip = "", max(self._chars_to_skip - len(text), 0)
        return lacking

    def _update_piece_table(self) -> None:
        held = self._stops is not None and not self._stops.idle
        self.piece_table = (
            None if held or self._unsent_text or self._chars_to_skip or self._finish else self._status.piece_table
        )
