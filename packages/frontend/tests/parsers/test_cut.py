"""Outputs that a limit cuts off: no part of a call or of a tag becomes content, wherever the cut is."""

import pytest

from packages.frontend.tests.parsers.transcripts import ParsedText, merge_events
from tercet.frontend.parsers.call_writer import write_calls
from tercet.frontend.parsers.port import Parser, ToolSpec
from tercet.frontend.parsers.registry import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ParserNames,
    make_parser,
    reasoning_format,
    tool_format,
    tool_parser,
)

TOOLS = [
    ToolSpec("get_weather", {"properties": {"city": {"type": "string"}, "exact": {"type": "boolean"}}}),
    ToolSpec("now"),
]
WORDS = "Let me look.\n"
SHORTEST = 2
"""Characters that do not identify a marker."""


def cut(parser: Parser, text: str) -> ParsedText:
    return merge_events(parser.feed(text) + parser.finish(cut=True))


def within(text: str, whole: str, most: int = SHORTEST) -> bool:
    """Return whether a text is a beginning of the whole, with at most the first characters of a marker after it."""
    return any(whole.startswith(text[: len(text) - extra].rstrip()) for extra in range(most + 1))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_that_is_cut_off_shows_no_markup(name: str) -> None:
    form = tool_format(name)
    calls: list[tuple[str, dict[str, object]]] = [("get_weather", {"city": "Oslo", "exact": True}), ("now", {})]
    text = WORDS + write_calls(form.framing, calls)
    whole = [call.arguments for call in cut(tool_parser(form, TOOLS), text).calls]
    assert len(whole) == 2
    for end in range(len(text) + 1):
        found = cut(tool_parser(form, TOOLS), text[:end])
        assert within(found.text, WORDS), f"{text[:end]!r} shows {found.text!r}"
        for call, arguments in zip(found.calls, whole, strict=False):
            # A line break before the marker does not count, and is two characters in JSON.
            assert within(call.arguments, arguments, SHORTEST + 2), text[:end]


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_a_tag_of_reasoning_that_is_cut_off_is_not_shown(name: str) -> None:
    framing = reasoning_format(name).framing
    text = f"{framing.begin}I think{framing.end}{framing.turn}{framing.answer}Hello"
    for end in range(len(text) + 1):
        parser = make_parser(ParserNames(reasoning=name), prompt="")
        assert parser is not None
        found = cut(parser, text[:end])
        assert within(found.reasoning, "I think"), text[:end]
        assert within(found.text, "Hello"), text[:end]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "a <b"),
        ("hermes", "a <tool_call>x"),
        ("generic", 'So: {"na'[:-2]),
        ("generic", '{"name": "Ada'),
        ("generic", "[1, 2"),
        ("llama3_json", '{"city": "Os'),
        ("llama_pythonic", "[1"),
        ("llama_pythonic", "see [note"),
        ("phi4_mini", "import functools, os"),
        ("glm4", "get_time"),
        ("mistral", "[TOOL] x"),
    ],
)
def test_content_that_is_cut_off_stays(name: str, text: str) -> None:
    assert cut(tool_parser(tool_format(name), TOOLS), text).text == text


@pytest.mark.parametrize(
    ("name", "text"),
    [("hermes", 'a <tool_call>\n{"name": "get_wea'), ("generic", '{"name": "get_wea'), ("llama_pythonic", "[get_wea")],
)
def test_an_answer_that_the_model_ends_itself_loses_nothing(name: str, text: str) -> None:
    parser = tool_parser(tool_format(name), TOOLS)
    assert merge_events(parser.feed(text) + parser.finish()).text == text
