"""The estimated cost of JSON equals the parser's view, for any cut of the text."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.frontend.http.request_body import StructureCounter, StructureCounts, count_structural

VALUES = st.recursive(
    st.none() | st.integers(0, 9) | st.text('a"\\:,{[\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text('a"\\:,{['), inner),
)


def shape_of(value: object) -> StructureCounts:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    parts = [shape_of(each) for each in inner]
    values = isinstance(value, dict | list) + (len(inner) if isinstance(value, dict) else 0)
    return StructureCounts(
        values + sum(each.values for each in parts), max(len(inner) - 1, 0) + sum(each.items for each in parts)
    )


@given(VALUES, st.integers(1, 9))
def test_strings_count_for_nothing(value: object, step: int) -> None:
    text, counter = orjson.dumps(value), StructureCounter()
    for start in range(0, len(text), step):
        counter.feed(text[start : start + step])
    assert counter.counts == shape_of(value)
    assert count_structural(text) >= counter.counts.values + counter.counts.items


@pytest.mark.parametrize("text", [rb'"\\\\",', rb'"\\\"",', rb'"a\\",', rb'"\"",'])
def test_a_quote_ends_a_string_unless_it_is_escaped(text: bytes) -> None:
    counter = StructureCounter()
    counter.feed(text)
    assert counter.counts == StructureCounts(0, 1)
