"""Counts an answer's tokens of reasoning, by the markers that its tokens spell, whatever pieces they arrive in."""

from collections.abc import Iterable

from tercet.frontend.model.token_bytes import TokenBytes
from tercet.frontend.parsers.port import ReasoningFraming


class ReasoningTokens:
    """One choice's count: every token from where reasoning begins through the marker that ends it.

    A token that ends a marker and goes on is still of reasoning. Reasoning that only its own begin marker shows begins
    with the token that completes the marker, and the marker's other tokens are added then.
    """

    def __init__(self, names: TokenBytes, framing: ReasoningFraming, *, opened: bool) -> None:
        self.count = 0
        self._names = names
        self._begin = framing.begin.encode()
        self._ends = [end.encode() for end in (framing.end, *framing.extra_ends)]
        self._reach = max(map(len, [self._begin, *self._ends]))
        self._again = framing.repeats
        self._open = opened
        self._over = False
        self._tail = b""
        self._lengths: list[int] = []
        """Bytes of each token that the tail is of, for the tokens of a begin marker."""

    def read(self, token_ids: Iterable[int]) -> None:
        """More of the choice's tokens."""
        for token_id in token_ids:
            if self._over:
                return
            self._take(self._names[token_id])

    def _take(self, data: bytes) -> None:
        self._tail += data
        self._lengths.append(len(data))
        if self._open:
            self.count += 1
            if any(end in self._tail for end in self._ends):
                self._open = False
                self._over = not self._again
                self._forget(0)
        elif self._begin in self._tail:
            self.count += self._spanned(len(self._tail) - self._tail.index(self._begin))
            self._open = True
            self._forget(0)
        elif not self._again and (said := self._tail.lstrip()):
            # Only an answer's first words begin its reasoning.
            self._over = not self._begin.startswith(said)
        self._forget(self._reach)

    def _spanned(self, size: int) -> int:
        """How many of the last tokens have the tail's last `size` bytes."""
        tokens = 0
        for length in reversed(self._lengths):
            if size <= 0:
                break
            tokens += 1
            size -= length
        return tokens

    def _forget(self, keep: int) -> None:
        """Leave out tokens that no marker can reach back to."""
        while self._lengths and len(self._tail) - self._lengths[0] >= keep:
            self._tail = self._tail[self._lengths.pop(0) :]
