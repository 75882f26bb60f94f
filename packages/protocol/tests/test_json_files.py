"""Strict parser of model files: every fault is refused in one line."""

import json
from typing import Any

import pytest

from tercet.protocol.json_files import MOST_DEPTH, error_line, parse_json


@pytest.mark.parametrize(
    "value", [{"a": [1, 2.5, None, True, "ü\n🙂"]}, [], "x", 3, {"deep": [[{}]]}, {"large": 2**62, "small": -(2**62)}]
)
def test_ordinary_json_is_what_json_makes_of_it(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False)) == value


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e309", "-1e400", "1" * 401, "1" * 5000])
def test_numbers_that_no_float_holds_are_refused_with_their_path(number: str) -> None:
    with pytest.raises(ValueError, match=r"^rope\.1\.factor is not a finite number$"):
        parse_json(f'{{"rope": [1.5, {{"factor": {number}}}]}}')
    with pytest.raises(ValueError, match=r"^the value is not a finite number$"):
        parse_json(number)


def test_infinity_is_read_where_it_may_be() -> None:
    assert parse_json('{"limit": [0.0, Infinity]}', infinity=True) == {"limit": [0.0, {"__float__": "Infinity"}]}
    for number in ("NaN", "-Infinity", "1e309"):
        with pytest.raises(ValueError, match=r"^limit is not a finite number$"):
            parse_json(f'{{"limit": {number}}}', infinity=True)


def test_integers_beyond_64_bits_become_floats() -> None:
    """Tokenizers that have no limit say 10^30."""
    assert parse_json('{"model_max_length": 1000000000000000019884624838656}') == {"model_max_length": 1e30}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_depth_is_bounded(opening: str, closing: str) -> None:
    inner = "1" if opening != "[" else ""
    parse_json(opening * MOST_DEPTH + inner + closing * MOST_DEPTH)
    for depth in (MOST_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="inside one another"):
            parse_json(opening * depth + inner + closing * depth)


@pytest.mark.parametrize("content", [b"", b"{", b"{'a': 1}", b"[1,]", b'"\xff"', b'"\\ud800"', b"\xff\xfe{\x00}\x00"])
def test_what_is_no_json_is_a_value_error_of_one_line(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        parse_json(content)


def test_an_error_is_one_line_of_characters_that_can_be_sent() -> None:
    assert error_line(ValueError("one\n  two\tthree")) == "one two three"
    assert error_line(KeyError()) == "KeyError"
    assert error_line(ValueError("a\x1b[31m \ud800 b")) == "a\\x1b[31m \\ud800 b"
    assert error_line(ValueError("x" * 5000)) == "x" * 1000
