"""Input of a custom tool: independent of how its arguments are split, and equal to `json.loads`."""

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tercet.frontend.chat.custom_input import InputDecoder

SPACE = st.text(" \t\r\n", max_size=3)
CUTS = st.lists(st.integers(min_value=0, max_value=200), max_size=20)
ESCAPED = st.one_of(
    st.integers(min_value=0, max_value=0xFFFF).map("\\u{:04x}".format),
    st.integers(min_value=0xD800, max_value=0xDFFF).map("\\u{:04X}".format),
    st.sampled_from(["\\n", '\\"', "\\\\", "\\/", "\\b", "\\u0000"]),
    st.text(min_size=1, max_size=4).map(json.dumps).map(lambda text: text[1:-1]),
    st.text(st.characters(exclude_characters='"\\', exclude_categories=["Cs"]), min_size=1, max_size=4),
)
LIKE_ARGUMENTS = st.lists(
    st.sampled_from(['{"input": "', "{", "}", '"', "\\", "u", "\\ud83d", "\\ude00", "d8", "input", ":", " ", "é"])
).map("".join)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def read(*texts: str) -> str:
    decoder = InputDecoder()
    return "".join([*map(decoder.feed, texts), decoder.finish(complete=True)])


def without_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs."""
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


@given(st.text(), st.booleans(), st.tuples(SPACE, SPACE, SPACE, SPACE, SPACE), CUTS)
def test_any_text_comes_back(text: str, plain: bool, spaces: tuple[str, ...], cuts: list[int]) -> None:
    first, second, third, fourth, last = spaces
    value = json.dumps(text, ensure_ascii=plain)
    written = f'{first}{{{second}"input"{third}:{fourth}{value}{last}}}'
    assert read(*pieces(written, cuts)) == text


@given(st.lists(ESCAPED, max_size=20).map("".join), CUTS)
def test_escapes_are_what_json_makes_of_them(inside: str, cuts: list[int]) -> None:
    written = f'{{"input":"{inside}"}}'
    assert read(*pieces(written, cuts)) == without_surrogates(json.loads(written, strict=False)["input"])


@given(st.one_of(st.text(), LIKE_ARGUMENTS), CUTS)
def test_whatever_is_written_reads_the_same_however_it_is_cut(written: str, cuts: list[int]) -> None:
    result = read(written)
    result.encode()
    assert read(*pieces(written, cuts)) == result


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.text(), st.integers(), st.none()), min_size=1), CUTS)
def test_an_object_without_an_input_is_told_as_it_is(value: dict[str, Any], cuts: list[int]) -> None:
    written = json.dumps(value)
    expected = value["input"] if isinstance(value.get("input"), str) else written
    assert read(*pieces(written, cuts)) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("", ""),
        ("{}", ""),
        ("*** Begin Patch\n", "*** Begin Patch\n"),
        ('  "a\\nb"', '  "a\\nb"'),
        ('["a"]', '["a"]'),
        ('{"patch": "x"}', '{"patch": "x"}'),
        ('{"input": 1}', '{"input": 1}'),
        ('{"input"', '{"input"'),
        ('{"\\u0069nput": "x"}', "x"),
        ('{"why": "so", "input": "a\\ud800"}', "a\ufffd"),
        ('{"input": "a", "why": "so"}', "a"),
        ('{"input": "a\nb\tc"}', "a\nb\tc"),
        ('{"input": "\\d+ \\uzz \\\'"}', "\\d+ \\uzz \\'"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\', "a"),
        ('{"input": "\\ud83d\\ud83d\\ude00"}', "\ufffd\U0001f600"),
        ('{"input": "\\ud83d\\n"}', "\ufffd\n"),
        ('{"a":' * 5000, '{"a":' * 5000),
    ],
)
def test_what_is_no_plain_call_loses_nothing_that_can_be_told(written: str, expected: str) -> None:
    assert read(written) == expected
    assert read(*written) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (" ", ""),
        ("{", ""),
        ('{ "inp', ""),
        ('{"input" : ', ""),
        ('{"input": "', ""),
        ('{"input": "a\\', "a"),
        ('{"patch": "x', '{"patch": "x'),
        ("*** Begin", "*** Begin"),
    ],
)
def test_of_what_is_cut_off_the_beginning_of_an_object_is_no_input(written: str, expected: str) -> None:
    decoder = InputDecoder()
    assert decoder.feed(written) + decoder.finish(complete=False) == expected


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    decoder = InputDecoder()
    texts = ['{ "in', 'put": "', "ab", "c\\", "n", "\\ud83d", "\\ude00d", '"', "}"]
    assert [decoder.feed(text) for text in texts] == ["", "", "ab", "c", "\n", "", "\U0001f600d", "", ""]
    plain = InputDecoder()
    assert [plain.feed(text) for text in (" ", "*** Begin", " Patch")] == ["", " *** Begin", " Patch"]
