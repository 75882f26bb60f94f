"""Budget of reasoning tokens, counted beside a grammar: its end marker is several tokens, so no grammar can count them.

Tokens of the markers are not counted. A token that contains the marker's beginning and other text is.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self

from llguidance import LLTokenizer

from tercet.protocol.messages.values import ThinkingBudget


class ThinkingCounter:
    """Counter of one output's reasoning tokens."""

    def __init__(self, budget: ThinkingBudget, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._begin, self._end = budget.begin.encode(), budget.end.encode()
        self._left = budget.tokens
        self._thinking = not budget.begin
        self._finished = False
        self._tail = b""
        """Bytes of the output that may belong to a marker."""
        self._sizes: list[int] = []
        """Bytes of each token that lies in the tail as a whole."""

    @property
    def thinking(self) -> bool:
        """Return whether reasoning has begun and not ended."""
        return self._thinking

    def read(self, tokens: Sequence[int]) -> None:
        """Append tokens to the output."""
        for token in tokens:
            if self._finished:
                return
            data = self._tokenizer.decode_bytes([token])
            if self._thinking:
                self._read_thought(data)
            else:
                self._read_begin(data)

    def allowed(self) -> list[int]:
        """Return the only tokens that may come next; none if the budget leaves the choice free."""
        if not self._thinking or self._left > len(self._sizes):
            return []
        nexts = {self._tokenizer.tokenize_bytes(self._end[len(self._tail) :])[0]}
        if self._left == len(self._sizes) > 0:  # the beginning of a marker may be a thought
            nexts.add(self._tokenizer.tokenize_bytes(self._end)[0])
        return sorted(nexts)

    def copy(self) -> Self:
        """Return another counter in the same state."""
        other = copy(self)
        other._sizes = [*self._sizes]
        return other

    def _read_begin(self, data: bytes) -> None:
        self._tail += data
        begun = self._tail.lstrip()
        if begun.startswith(self._begin):
            self._thinking, self._tail = True, b""
            if rest := begun[len(self._begin) :]:
                self._read_thought(rest)
        elif not self._begin.startswith(begun):
            self._finished = True

    def _read_thought(self, data: bytes) -> None:
        self._tail += data
        self._sizes.append(len(data))
        if self._end in self._tail:
            self._thinking, self._finished = False, True
            return
        kept = next(size for size in range(min(len(self._tail), len(self._end)), -1, -1) if self._ends_with(size))
        while sum(self._sizes) > kept:
            del self._sizes[0]
            self._left -= 1
        self._tail = self._tail[len(self._tail) - kept :]

    def _ends_with(self, size: int) -> bool:
        return self._tail.endswith(self._end[:size])
