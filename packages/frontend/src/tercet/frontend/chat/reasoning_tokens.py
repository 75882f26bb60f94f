"""Counter of reasoning tokens, independent of how the text is split into updates."""

from collections.abc import Iterable

from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.parsers.port import ReasoningFraming


class ReasoningTokens:
    """Counter for one choice: every token from the beginning of reasoning through its end marker.

    A token that contains the end of a marker and more text counts as reasoning. If reasoning begins with a marker in
    the answer, all tokens of that marker are counted once it is complete.
    """

    def __init__(self, names: TokenBytes, framing: ReasoningFraming, *, opened: bool) -> None:
        self.count = 0
        self._token_bytes = names
        self._begin = framing.begin.encode()
        self._ends = [end.encode() for end in (framing.end, *framing.extra_ends)]
        self._longest_marker = max(map(len, [self._begin, *self._ends]))
        self._repeats = framing.repeats
        self._open = opened
        self._finished = False
        self._tail = b""
        self._lengths: list[int] = []
        """Bytes of each token in the tail, to count the tokens of a begin marker."""

    def read(self, token_ids: Iterable[int]) -> None:
        """Count more tokens of the choice."""
        for token_id in token_ids:
            if self._finished:
                return
            self._count_token(self._token_bytes[token_id])

    def _count_token(self, data: bytes) -> None:
        self._tail += data
        self._lengths.append(len(data))
        if self._open:
            self.count += 1
            if any(end in self._tail for end in self._ends):
                self._open = False
                self._finished = not self._repeats
                self._trim(0)
        elif self._begin in self._tail:
            self.count += self._tokens_in_suffix(len(self._tail) - self._tail.index(self._begin))
            self._open = True
            self._trim(0)
        elif not self._repeats and (begun := self._tail.lstrip()):
            # Reasoning can only begin at the start of an answer.
            self._finished = not self._begin.startswith(begun)
        self._trim(self._longest_marker)

    def _tokens_in_suffix(self, size: int) -> int:
        """Return how many of the last tokens contribute to the tail's last `size` bytes."""
        tokens = 0
        for length in reversed(self._lengths):
            if size <= 0:
                break
            tokens += 1
            size -= length
        return tokens

    def _trim(self, keep: int) -> None:
        """Drop tokens that cannot be part of a marker any more."""
        while self._lengths and len(self._tail) - self._lengths[0] >= keep:
            self._tail = self._tail[self._lengths.pop(0) :]
