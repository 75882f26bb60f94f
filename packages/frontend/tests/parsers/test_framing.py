"""Calls written with a format's own framing are read back by its parser."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.frontend.tests.parsers.transcripts import read
from packages.protocol.tests.extents import extents
from tercet.frontend.parsers.call_writer import example_call, write_calls
from tercet.frontend.parsers.events import ToolArgumentsDelta, ToolCallStart
from tercet.frontend.parsers.port import ToolFraming, ToolSpec
from tercet.frontend.parsers.registry import TOOL_FORMATS, tool_format, tool_parser

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
Arguments = dict[str, object]

words = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
calls_of = st.lists(st.tuples(names, st.dictionaries(names, values, max_size=4)), min_size=1, max_size=3)


def spec(name: str, arguments: Arguments) -> ToolSpec:
    return ToolSpec(
        name, {"properties": {key: {"type": _TYPES.get(type(it), "null")} for key, it in arguments.items()}}
    )


@pytest.mark.parametrize("name", TOOL_FORMATS)
@extents(8, 100)
def test_written_calls_are_read(name: str, extent: settings) -> None:
    form = tool_format(name)

    @extent
    @given(calls=calls_of, cut=st.integers(1, 30))
    def check(calls: list[tuple[str, Arguments]], cut: int) -> None:
        calls = list(dict(calls).items())  # a tool has one schema
        text = write_calls(form.framing, calls)
        parser = tool_parser(form, [spec(tool, arguments) for tool, arguments in calls])
        found = read(parser, [text[at : at + cut] for at in range(0, len(text), cut)])
        assert [(call.name, json.loads(call.arguments), call.complete) for call in found.calls] == [
            (tool, arguments, True) for tool, arguments in calls
        ]
        assert found.text == ""

    check()


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_calls_of_a_history_are_written_as_the_model_does(name: str) -> None:
    form = tool_format(name)
    arguments: Arguments = {"path": 'a "b"\n\ue000', "on": True, "limit": None, "tags": ["x", {"k": [1, False, None]}]}
    calls: list[tuple[str, Arguments]] = [("save", arguments), ("now", {})]
    parser = tool_parser(form, [spec(tool, each) for tool, each in calls])
    found = read(parser, [write_calls(form.framing, calls)])
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == calls
    assert "save" in example_call(form.framing, "save")


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_arguments_come_as_they_are_written(name: str) -> None:
    """The first half of a long string is emitted before the other half arrives."""
    form, long = tool_format(name), "lorem ipsum " * 20
    before, _, _ = write_calls(form.framing, [("save", {"path": "here"})]).partition("here")
    parser = tool_parser(form, [spec("save", {"path": "here"})])
    events = parser.feed(before + long)
    assert events[0] == ToolCallStart(0, "save", getattr(events[0], "id", None))
    assert events[1] == ToolArgumentsDelta(0, '{"path": "' + long)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_the_trigger_begins_what_is_written(name: str) -> None:
    framing = tool_format(name).framing
    assert write_calls(framing, [("now", {})]).startswith(framing.trigger.replace("$name", "now"))


def test_placeholders_stand_for_name_index_and_key() -> None:
    framing = ToolFraming(prefix="$name:$index(", suffix=")", key_prefix="<$key>", trigger="")
    assert framing.prefix_of("f", 2) == "f:2("
    assert framing.key_prefix_of("k") == "<k>"
