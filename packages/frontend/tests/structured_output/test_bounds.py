"""Numbers that a schema's bounds let through are within them, by exact arithmetic."""

import json
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tercet.frontend.errors import BadRequestError
from tercet.frontend.json_number import JsonNumber, exact_number, parse_json
from tercet.frontend.structured_output.json_schema import schema_text

BYTES = LLTokenizer("byte")
LIMITS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
EDGES = ["0", "-0.0", "5", "-5", "5.5", "-5.5", "4.99", "0.5", "-0.5", "1e-7", "1e-30", "-1e-400", "100", "1e3", "-10"]
EDGES += ["9007199254740993", "-9007199254740993", "9223372036854775807", "-9223372036854775808", "1e20", "-1e20"]
EDGES += ["1.7976931348623157e308", "1e400", "0.1000000000000000055511151231257827", "12345678901234567890123"]
EDGES += ["0.30000000000000004", "123456789.125", "1000000000000000000"]


def matcher(schema: Any) -> LLMatcher | None:
    """Return the matcher of a schema; None if it is refused."""
    try:
        text = schema_text(schema, "schema")
    except BadRequestError:
        return None
    found = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(text), log_level=0)
    return None if found.is_error() else found


def accepts(found: LLMatcher, text: str) -> bool:
    copy, data = found.deep_copy(), list(text.encode())
    return bool(copy.try_consume_tokens(data) == len(data) and copy.is_accepting())


def near(edge: str) -> Iterator[str]:
    """Yield texts of numbers at and around an edge."""
    value = exact_number(parse_json(edge))
    if abs(value) > 10**25:
        return
    for step in ("0", "1", "0.5", "0.1", "0.01", "1e-7", "1e-13", "1e-20", "1e-31"):
        for sign in (1, -1):
            number = value + sign * exact_number(parse_json(step))
            digits = f"{Decimal(number.numerator) / Decimal(number.denominator):f}"
            yield digits
            yield f"{digits}0" if "." in digits else f"{digits}.0"
            yield f"{digits}e0"


def fits(schema: dict[str, Any], text: str) -> bool:
    value = Fraction(text)
    low = [exact_number(schema[each]) for each in ("minimum", "exclusiveMinimum") if each in schema]
    high = [exact_number(schema[each]) for each in ("maximum", "exclusiveMaximum") if each in schema]
    return (
        all(each <= value for each in low)
        and all(each >= value for each in high)
        and all(exact_number(schema[each]) != value for each in LIMITS[2:] if each in schema)
        and (schema["type"] == "number" or value.denominator == 1)
        and ("multipleOf" not in schema or (value / exact_number(schema["multipleOf"])).denominator == 1)
    )


@settings(max_examples=120, deadline=None)
@given(
    kind=st.sampled_from(["number", "integer"]),
    limits=st.dictionaries(st.sampled_from(LIMITS), st.sampled_from(EDGES), min_size=1, max_size=3),
    multiple=st.none() | st.sampled_from(["1", "2", "0.5", "0.1", "0.01", "3", "1e-7"]),
)
def test_every_number_that_passes_is_within_the_bounds(kind: str, limits: dict[str, str], multiple: str | None) -> None:
    schema = {"type": kind, **{name: parse_json(edge) for name, edge in limits.items()}}
    if multiple:
        schema["multipleOf"] = parse_json(multiple)
    if (found := matcher(schema)) is not None:
        for text in {each for edge in limits.values() for each in near(edge)}:
            assert fits(schema, text) or not accepts(found, text), (schema, text)


@pytest.mark.parametrize("split", [False, True])
def test_an_exclusive_bound_beside_a_bound_of_the_same_whole_part(split: bool) -> None:
    for whole, sign, names in product((0, 5, 100), (1, -1), (LIMITS[1:3], LIMITS[2:])):
        near_bound, far_bound = sign * whole, sign * (whole + 0.5)
        low, high = (names[1], names[0]) if names == LIMITS[1:3] else names
        if sign < 0:
            low, high = ("minimum" if high == "maximum" else "exclusiveMinimum"), "exclusiveMaximum"
        bounds: list[dict[str, Any]] = [{low: min(near_bound, far_bound)}, {high: max(near_bound, far_bound)}]
        schema = {"type": "number", **({"allOf": bounds} if split else bounds[0] | bounds[1])}
        found = matcher(schema)
        assert found is not None
        for text in (f"{near_bound}", f"{near_bound}.0", f"{'-' if sign < 0 else ''}{whole}.000"):
            assert not accepts(found, text), (schema, text)
        inner = f"{'-' if sign < 0 else ''}{whole}.25"
        assert accepts(found, inner), (schema, inner)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "number", "minimum": 0, "maximum": parse_json("1e400")}, ["0", "0.5", "123456789012345"]),
        ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0", "-9223372036854774784"]),
        ({"type": "integer", "minimum": 10**18}, ["1000000000000000000", "9223372036854774784"]),
        ({"type": "number", "maximum": -1e18}, ["-1000000000000000000"]),
        ({"type": "integer", "exclusiveMinimum": 5, "maximum": 6.5}, ["6"]),
        ({"type": "integer", "minimum": 5, "exclusiveMinimum": True}, ["6"]),
        ({"type": "number", "exclusiveMinimum": 0}, ["0.001", "1", "1000"]),
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 1}, ["0.5", "0.001", '"a"']),
        ({"minimum": 5, "maximum": 5}, ["5"]),
        ({"type": "number", "minimum": 1e-300}, ["0.1", "1"]),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 4}, [str(2**53 + 2)]),
    ],
)
def test_numbers_within_bounds_pass(schema: Any, texts: list[str]) -> None:
    found = matcher(schema)
    assert found is not None
    assert [text for text in texts if not accepts(found, text)] == []


@pytest.mark.parametrize("number", ["9007199254740993", "-9223372036854775808", "1e400", "12345678901234567890123"])
@pytest.mark.parametrize("wrap", ["const", "enum", "array", "object"])
def test_a_constant_that_cannot_be_written_exactly_is_refused_or_left_out(number: str, wrap: str) -> None:
    value = {"array": [parse_json(number)], "object": {"a": parse_json(number)}}.get(wrap, parse_json(number))
    with pytest.raises(BadRequestError, match="too many digits"):
        schema_text({"properties": {"a": {"enum": [value]} if wrap == "enum" else {"const": value}}}, "schema")
    text = schema_text({"enum": [value, 1, "a"]}, "schema")
    assert json.loads(text)["enum"] == [1, "a"]


def test_other_constants_are_written_exactly() -> None:
    for number in ("0", "-1", "1.5", "1e300", "9007199254740992", "1000000000000000000", "0.1", "-0.0000001"):
        found = matcher({"enum": [parse_json(number)]})
        assert found is not None
        written = "".join(map(chr, found.compute_ff_tokens()))
        assert Fraction(written) == Fraction(number)


def test_annotations_of_any_number_do_not_reach_the_grammar() -> None:
    huge = JsonNumber("1e400")
    text = schema_text({"default": huge, "examples": [huge], "x-limit": huge, "type": "number"}, "schema")
    assert "1e400" not in text
