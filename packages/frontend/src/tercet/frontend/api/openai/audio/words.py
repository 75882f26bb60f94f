"""Words of a transcript with their times, made of tokens that may be parts of words and of characters."""

import string
from collections.abc import Callable, Sequence

import msgspec

_UNFINISHED = "\ufffd"
"""Text of bytes that are no character."""
_OPENING, _CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
"""Punctuation that belongs to the word after it, and to the word before it."""
WITHOUT_SPACES = frozenset({"ja", "lo", "my", "th", "yue", "zh"})
"""Codes of the languages that write no spaces between words: each character is one."""


class Word(msgspec.Struct, frozen=True):
    """Text of tokens [first, last)."""

    text: str
    first: int
    last: int

    def __add__(self, other: "Word") -> "Word":
        return Word(self.text + other.text, self.first, other.last)


def words_of(ids: Sequence[int], decode: Callable[[list[int]], str], *, spaced: bool) -> list[Word]:
    """Return the words of tokens in a language that is written with or without spaces."""
    characters = _whole_characters(ids, decode)
    words: list[Word] = []
    for each in characters:
        begins = not spaced or not words or each.text.startswith(" ") or each.text.strip() in string.punctuation
        if begins:
            words.append(each)
        else:
            words[-1] += each
    return _with_closing(_with_opening(words))


def _whole_characters(ids: Sequence[int], decode: Callable[[list[int]], str]) -> list[Word]:
    """Return the shortest runs of tokens that are whole characters. The last may be unfinished."""
    whole = decode(list(ids))
    found: list[Word] = []
    first = begun = 0
    for last in range(1, len(ids) + 1):
        text = decode(list(ids[first:last]))
        if _UNFINISHED not in text or whole.startswith(text, begun) or last == len(ids):
            found.append(Word(text, first, last))
            first, begun = last, begun + len(text)
    return found


def _with_opening(words: Sequence[Word]) -> list[Word]:
    """Join opening punctuation after a space to the word after it."""
    joined: list[Word] = []
    for word in reversed(words):
        if joined and word.text.startswith(" ") and word.text.strip() in _OPENING:
            joined[-1] = word + joined[-1]
        else:
            joined.append(word)
    return joined[::-1]


def _with_closing(words: Sequence[Word]) -> list[Word]:
    """Join closing punctuation to the word before it."""
    joined: list[Word] = []
    for word in words:
        if joined and not joined[-1].text.endswith(" ") and word.text in _CLOSING:
            joined[-1] += word
        else:
            joined.append(word)
    return joined
