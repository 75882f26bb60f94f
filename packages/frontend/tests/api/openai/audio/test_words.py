"""Tokens become words: by spaces and punctuation, or by characters."""

import pytest

from tercet.frontend.api.openai.audio.words import words_of


def words(*tokens: bytes, spaced: bool = True) -> list[str]:
    """Return the words of tokens that are these bytes, and check that they cover all tokens."""

    def decode(ids: list[int]) -> str:
        return b"".join(tokens[each] for each in ids).decode(errors="replace")

    found = words_of(range(len(tokens)), decode, spaced=spaced)
    assert [each.first for each in found] == [0, *(each.last for each in found)][: len(found)]
    assert not found or found[-1].last == len(tokens)
    return [each.text for each in found]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([b" Hel", b"lo", b" wor", b"ld"], [" Hello", " world"]),
        ([b"Hello", b",", b" world", b"!", b"?"], ["Hello,", " world!?"]),
        ([b" say", b' "', b"yes", b'"', b" (", b"no", b")"], [" say", ' "yes"', " (no)"]),
        ([b" It", b"'s", b" 3", b".", b"5"], [" It's", " 3", ".5"]),
        ([b" caf", b"\xc3", b"\xa9", b" ol", b"\xc3\xa9"], [" caf\u00e9", " ol\u00e9"]),
        ([b" bad", b"\xff", b" end"], [" bad\ufffd", " end"]),
        ([b" cut", b"\xe4\xb8"], [" cut\ufffd"]),
        ([b"\xe4\xb8\x80", b"\xe4", b"\xb8\x80"], ["\u4e00\u4e00"]),
    ],
)
def test_words_begin_at_spaces_and_keep_their_punctuation(tokens: list[bytes], expected: list[str]) -> None:
    assert words(*tokens) == expected


def test_characters_are_words_where_no_spaces_are_written() -> None:
    tokens = ["\u4f60".encode(), "\u597d".encode()[:1], "\u597d".encode()[1:], "\u3002".encode(), b"OK"]
    assert words(*tokens, spaced=False) == ["\u4f60", "\u597d\u3002", "OK"]
