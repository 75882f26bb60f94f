"""Numbers of clients keep their digits from a request to prompts, stored items and answers."""

import copy
import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.frontend.json_number import (
    OVERLAP,
    JsonNumber,
    dump_json,
    exact_number,
    json_text,
    may_have_long_numbers,
    parse_json,
)

LONG = ["1e400", "-1e400", "1e-400", "12345678901234567890123", "0.1000000000000000055511151231257827", "9" * 5000]
LONG += ["18446744073709551616", "-9223372036854775809", "1E+999999999999999999999", "123.4567890123456789"]
SHORT = ["0", "-0.0", "1.5", "1e300", "18446744073709551615", "-9223372036854775808", "0.1234567890123456", "1e-5"]


@pytest.mark.parametrize("text", LONG)
def test_a_long_number_keeps_its_text(text: str) -> None:
    whole = f'{{"a":[{text},"{text}"],"b":{text}}}'
    value = parse_json(whole)
    assert dump_json(value) == whole.encode()
    assert json_text(value, separators=(",", ":")) == whole
    assert dump_json(copy.deepcopy(value)) == whole.encode()
    assert f"{value['b']}" == text
    assert isinstance(value["b"], float)


@pytest.mark.parametrize("text", SHORT)
def test_any_other_number_is_what_orjson_reads(text: str) -> None:
    value = parse_json(text)
    assert type(value) is type(orjson.loads(text))
    assert value == orjson.loads(text)
    assert exact_number(value) == Fraction(text)


@pytest.mark.parametrize(
    "text", ["[1e400,NaN]", '["\\ud800",1e400]', "[1e400", "1e400 1", "[01234567890123456789]", ""]
)
def test_no_other_text_is_json(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(text)
    with pytest.raises(orjson.JSONDecodeError):
        parse_json("[" * 5000 + "1e400" + "]" * 5000)


numbers = st.integers().map(str) | st.floats(allow_nan=False, allow_infinity=False).map(repr)
numbers |= st.decimals(allow_nan=False, allow_infinity=False).map(lambda each: f"{each:E}".lower())


@given(number=numbers, beside=st.text(max_size=20))
def test_every_number_keeps_its_value(number: str, beside: str) -> None:
    text = json.dumps({beside: "x"})[:-1] + f', "n": [{number}]}}'
    value: dict[str, Any] = parse_json(text)
    [kept] = json.loads(dump_json(value), parse_float=Decimal, parse_int=Decimal)["n"]
    assert kept == Decimal(number)


def test_the_numbers_of_a_text_with_too_many_long_ones_are_doubles() -> None:
    fewer, more = ("[" + ",".join([each] * 65_537) + "]" for each in ("0.5", "0.12345678901234567890"))
    assert type(parse_json(fewer[:-1] + ",1e400]")[-1]) is JsonNumber
    assert set(map(type, parse_json(more))) == {float}
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(more[:-1] + ",1e400]")


def test_the_exact_value_takes_bounded_work() -> None:
    assert exact_number(JsonNumber("1" + "0" * 100_000 + "e-100000")) == 1
    assert exact_number(JsonNumber("-1e999999999999999999999999")) == -(10**400)
    with pytest.raises(ValueError, match="not a number"):
        exact_number(True)


@given(
    st.lists(st.sampled_from([*LONG[:5], *LONG[6:], *SHORT, '"a"', '"12345678901234567890"', "[]"]), min_size=1),
    st.integers(1, 40),
)
def test_parts_of_a_text_show_its_long_numbers(values: list[str], size: int) -> None:
    text = f"[{', '.join(values)}]".encode()
    parts = [(text[max(0, start - OVERLAP) : start + size], min(start, OVERLAP)) for start in range(0, len(text), size)]
    assert any(may_have_long_numbers(part, first) for part, first in parts) is may_have_long_numbers(text)
