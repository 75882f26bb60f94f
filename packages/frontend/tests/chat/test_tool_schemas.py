"""Hostile schemas of tools only fail their own request."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.frontend.tests.chat.test_call_grammar import grammar_of
from tercet.frontend.errors import BadRequestError
from tercet.frontend.parsers.port import ToolSpec

WORDS = ["a", "b", "", "x-guidance", "$ref", "#/$defs/a", "string", "integer", "object", "$index", "\n", "/"]
KEYWORDS = ["type", "properties", "required", "enum", "const", "$ref", "$defs", "anyOf", "items", "minLength"]
KEYWORDS += ["maxLength", "minimum", "pattern", "format", "additionalProperties", "x-guidance", "a"]

words, keywords = st.sampled_from(WORDS), st.sampled_from(KEYWORDS)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 99) | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keywords | words, inner, max_size=4),
    max_leaves=12,
)
schemas = st.dictionaries(keywords, values, max_size=5) | st.builds(
    lambda properties, more: {**more, "type": "object", "properties": properties},
    st.dictionaries(words, values, max_size=3),
    st.dictionaries(keywords, values, max_size=3),
)


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen3_coder", "llama_pythonic"])
@settings(max_examples=60, deadline=None)
@given(schema=schemas, strict=st.booleans(), required=st.booleans())
def test_a_schema_is_a_grammar_or_a_refusal(name: str, schema: Any, strict: bool, required: bool) -> None:
    param, text = "tools", ""
    try:
        text = grammar_of(name, (ToolSpec("f", schema, strict=strict),), required=required).text
    except BadRequestError as refusal:
        param = refusal.param or ""
    assert param == "tools"
    assert "start: " in text or not text
