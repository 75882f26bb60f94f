"""A text whose long strings are parsed by themselves has the same value and faults as in one piece."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.frontend.http.long_strings import LONG, PIECE, InvalidJsonError, parse_in_steps
from tercet.frontend.http.loop_turns import result_of
from tercet.frontend.json_number import JsonNumber

CHARACTERS = st.text('a"\\\n\x7f\u00e9\u20ac\U0001f600{[,:', min_size=1, max_size=5)
STRINGS = st.builds(lambda text, times: text * times, CHARACTERS, st.sampled_from([1, 1, LONG // 2, PIECE // 3]))
VALUES = st.recursive(
    STRINGS | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(STRINGS, inner, max_size=3),
    max_leaves=8,
)


def parsed(text: bytes) -> Any:
    return result_of(parse_in_steps(bytearray(text), plain=True))


@settings(max_examples=60, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_every_value_comes_back(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    assert parsed(text) == orjson.loads(text)


def test_of_equal_long_keys_the_last_one_counts_and_keeps_the_first_place() -> None:
    key = "k" * LONG
    text = f'{{"{key}": 1, "b": 2, "{key}": 3}}'.encode()
    assert list(parsed(text).items()) == [(key, 3), ("b", 2)]


def test_numbers_keep_their_digits() -> None:
    text = b'{"a": "%b", "b": 0.12345678901234567890}' % (b"x" * LONG)
    value = result_of(parse_in_steps(text, plain=False))["b"]
    assert (type(value), str(value)) == (JsonNumber, "0.12345678901234567890")


@pytest.mark.parametrize("fault", [rb"\ud800", rb"\ud800\n", rb"\x", rb"\u12g4", b"\xff", b"\xe2\x82", b"\n", b"\\"])
@pytest.mark.parametrize("before", [0, LONG, PIECE - 4, 2 * PIECE - 3])
def test_faults_within_strings_are_found(fault: bytes, before: int) -> None:
    text = b'["ok", "' + b"x" * before + fault + b'"]'
    with pytest.raises(orjson.JSONDecodeError):
        orjson.loads(text)
    with pytest.raises(InvalidJsonError) as caught:
        parsed(text)
    assert before + 8 - PIECE <= caught.value.at <= len(text)


@pytest.mark.parametrize("long", ["x" * LONG, "\u20ac" * LONG])
def test_faults_after_long_strings_keep_their_place(long: str) -> None:
    text = f'["{long}", "{long}", ?'.encode()
    with pytest.raises(InvalidJsonError) as caught:
        parsed(text)
    assert caught.value.at == text.index(b"?")


@pytest.mark.parametrize("text", [b"", b'"', b'"' + b"x" * LONG, b'["' + b"x" * LONG + b'"', b"[1]]"])
def test_texts_that_are_cut_off_are_refused(text: bytes) -> None:
    with pytest.raises(InvalidJsonError):
        parsed(text)


@pytest.mark.parametrize("text", ["x" * (9 * PIECE), "\\n" * (4 * PIECE), "\u20ac" * (3 * PIECE)])
def test_a_step_takes_one_piece_of_a_string(text: str) -> None:
    steps = sum(1 for _ in parse_in_steps(f'["{text}"]'.encode(), plain=True))
    assert steps >= len(text.encode()) // PIECE
