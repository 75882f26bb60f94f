"""Python literals become the JSON of the same value."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.frontend.parsers.python_scan import python_to_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
literals = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(literals)
def test_any_literal_keeps_its_value(value: object) -> None:
    written = python_to_json(repr(value))
    assert written is not None
    assert json.loads(written) == value


@given(st.text(st.characters(codec="utf-8")))
def test_text_in_either_quotes_keeps_its_value(value: str) -> None:
    for quote in ("'", '"'):
        escaped = value.replace("\\", "\\\\").replace(quote, "\\" + quote).replace("\n", "\\n")
        assert json.loads(python_to_json(quote + escaped + quote) or "") == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1, 'a')", '[1, "a"]'),
        ("[ ]", "[]"),
        ("{'a': {},}", '{"a": {}}'),
        ("[true, null, False]", "[true, null, false]"),
        ("0x1F", "31"),
        ("1e999", "1e999"),
        ("1.10", "1.10"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        (".5", "0.5"),
        ("'a\\\nb'", '"ab"'),
        ("'\\q\\x41'", '"\\\\qA"'),
    ],
)
def test_forms_beyond_repr(text: str, expected: str) -> None:
    assert python_to_json(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "f(1)", "[1", "[1 2]", "{1: 2}", "{'a' 1}", "{'a'}", "'a", "'a\nb'", "nan", "1+2", "'\\xg1'",
        "'\\U00110000'", "1 2", "__import__('os')", "lambda: 0", "[" * 66 + "]" * 66, "9" * 5000, "'a' 'b'", "b'a'",
    ],
)  # fmt: skip
def test_what_is_no_literal_is_refused(text: str) -> None:
    assert python_to_json(text) is None
