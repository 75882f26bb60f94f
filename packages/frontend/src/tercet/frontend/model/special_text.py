"""Removal of special tokens from streamed text that was decoded with them for the parsers.

A model can spell a special token with ordinary tokens, so text that may be the beginning of one is held back.
"""

import re
from collections.abc import Iterable


class SpecialTexts:
    """Texts of one model's special tokens."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(filter(None, texts))
        longest_first = sorted(self.texts, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._beginnings = frozenset(text[:end] for text in self.texts for end in range(1, len(text)))
        self._longest_beginning = max(map(len, self._beginnings), default=0)

    def occur_in(self, text: str) -> bool:
        """Return whether the text contains a special token."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def split(self, text: str) -> list[str]:
        """Split the text at special tokens."""
        return self._pattern.split(text) if self._pattern is not None else [text]

    def find_partial(self, text: str) -> int:
        """Return the position of a possible beginning of a special token at the text's end, else the text's length."""
        for size in range(min(self._longest_beginning, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return len(text) - size
        return len(text)


class SpecialText:
    """Streaming filter of special tokens. Text around a removed token is not joined to another one."""

    def __init__(self, specials: SpecialTexts) -> None:
        self._specials = specials
        self._held = ""

    def feed(self, text: str) -> str:
        """Return the text that is certainly not part of a special token."""
        *certain, last = self._specials.split(self._held + text)
        at = self._specials.find_partial(last)
        self._held = last[at:]
        return "".join(certain) + last[:at]

    def finish(self) -> str:
        """Return the text held back."""
        held, self._held = self._held, ""
        return held
