"""Special tokens in a text that had to be decoded with them, because some are a parser's markers: the rest go.

A special token is one token, yet a model can spell its text out in others, so what may be its beginning waits.
"""

import re
from collections.abc import Iterable


class SpecialTexts:
    """The texts of one model's special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(filter(None, texts))
        longest_first = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def occur_in(self, text: str) -> bool:
        """Whether any of them is part of the text."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def between(self, text: str) -> list[str]:
        """What stands before, between and after special tokens in the text."""
        return self._pattern.split(text) if self._pattern is not None else [text]

    def beginning(self, text: str) -> int:
        """Where a special token may have begun at the end of the text; the text's length if none has."""
        for size in range(min(self._longest_beginning, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return len(text) - size
        return len(text)


class SpecialText:
    """Takes special tokens out of a text that arrives in pieces. What one stood between does not make another."""

    def __init__(self, specials: SpecialTexts) -> None:
        self._specials = specials
        self._held = ""

    def feed(self, text: str) -> str:
        """What of the text can be shown."""
        *certain, last = self._specials.between(self._held + text)
        at = self._specials.beginning(last)
        self._held = last[at:]
        return "".join(certain) + last[:at]

    def finish(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held
