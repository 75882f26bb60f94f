"""Custom tools as functions: their description, their enforcement, and the events for clients."""

import orjson
import pytest

from packages.frontend.tests.chat.test_call_grammar import calls_in, grammar_of, written
from packages.frontend.tests.chat.vocabulary import accepts, sample_answer
from tercet.frontend.chat.custom_calls import CustomCalls, custom_tool
from tercet.frontend.chat.output_parser import merge_events
from tercet.frontend.constraints import Lark, Regex
from tercet.frontend.parsers.events import Event, TextDelta, ToolArgumentsDelta, ToolCallEnd, ToolCallStart
from tercet.frontend.parsers.registry import TOOL_FORMATS, tool_parser

PATH = Regex(pattern=r"/[a-z]+(/[a-z]+)*")
DATE = custom_tool("date", "", Regex(pattern=r"[0-9]{4}-[0-9]{2}|to\"day\"|\n<>\n"))


def test_a_model_is_told_what_an_input_has_to_be() -> None:
    assert custom_tool("f", "Does it.").description == "Does it."
    assert custom_tool("f", "").description == ""
    lark = custom_tool("f", "Does it.", Lark(text='start: "a"'))
    assert lark.description == (
        'Does it.\n\nThe input has to be a text of the language that this Lark grammar defines:\nstart: "a"'
    )
    assert custom_tool("f", "", PATH).description == (
        f"The input has to match this regular expression, in whole:\n{PATH.pattern}"
    )
    assert (lark.strict, custom_tool("f", "", PATH).strict) == (False, True)


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_regular_expression_is_enforced_in_every_notation(name: str) -> None:
    path = grammar_of(name, (custom_tool("cd", "", PATH),))
    assert accepts(path, written(name, ("cd", {"input": "/usr/lib"})))
    for other in ("/usr/", "usr", "/usr/lib9", ""):
        assert not accepts(path, written(name, ("cd", {"input": other})))
    date = grammar_of(name, (DATE,))
    assert accepts(date, written(name, ("date", {"input": "2026-11"})))
    assert not accepts(date, written(name, ("date", {"input": "2026-11-22"})))
    assert not accepts(date, written(name, ("date", {"input": "2026-11", "more": 1})))


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("pattern", ["^[0-9]+$", r"^a$|^12$", r"\A12\z", "(?i)AB|12", r"12|/|\n|\x00", "12|\n"])
def test_an_expression_matches_from_end_to_end_whatever_it_has_there(name: str, pattern: str) -> None:
    grammar = grammar_of(name, (custom_tool("f", "", Regex(pattern=pattern)),))
    assert accepts(grammar, written(name, ("f", {"input": "12"})))
    for other in ("x12", "12x", "1212x"):
        assert not accepts(grammar, written(name, ("f", {"input": other})))


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_whatever_a_model_babbles_under_a_grammar_is_an_input(name: str) -> None:
    tool = custom_tool("cd", "", Regex(pattern=r"/[a-z]{1,3}(/[a-z]{1,3}){0,2}"))
    for seed in range(8):
        said = sample_answer(grammar_of(name, (tool,), several=False), seed)
        assert said is not None
        [call] = calls_in(name, said, (tool,))
        text = orjson.loads(call.arguments)["input"]
        assert set(text) <= set("/abcdefghijklmnopqrstuvwxyz")
        assert text.startswith("/")


def test_calls_of_other_tools_are_left_alone() -> None:
    events: list[Event] = [
        TextDelta("So."),
        ToolCallStart(0, "f", "1"),
        ToolArgumentsDelta(0, '{"input": "a"}'),
        ToolCallEnd(0),
    ]
    assert CustomCalls({"g"}).translate(events, last=True) == events


def test_what_is_held_back_is_told_before_what_follows() -> None:
    calls = CustomCalls({"f"})
    first = calls.translate([ToolCallStart(0, "f", "1"), ToolArgumentsDelta(0, '{"patch": ')], last=False)
    assert first == [ToolCallStart(0, "f", "1", custom=True)]
    more: list[Event] = [ToolArgumentsDelta(0, '"x'), TextDelta("no"), ToolCallStart(1, "f", "2")]
    held = ToolArgumentsDelta(0, '{"patch": "x', custom=True)
    assert calls.translate(more, last=False) == [held, TextDelta("no"), ToolCallStart(1, "f", "2", custom=True)]
    last: list[Event] = [ToolArgumentsDelta(1, '{"inp')]
    assert calls.translate(last, last=True) == [], "which is no input, but the beginning of what is around one"
    assert calls.translate([], last=True) == []


@pytest.mark.parametrize("text", ["ls -la", '["a"] + b', '{"a": 1}["a"]', '"a" b', "5 + 3"])
def test_a_text_may_begin_as_json_does_where_calls_stand_between_markers(text: str) -> None:
    for name, begin, end in (
        ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ):
        parser = tool_parser(TOOL_FORMATS[name](), (custom_tool("f", ""),))
        said = merge_events(parser.feed(begin + text + end) + parser.finish())
        assert (said.text, [(call.arguments, call.complete) for call in said.calls]) == ("", [(text, True)])


def test_each_call_is_read_from_its_own_beginning() -> None:
    calls = CustomCalls({"f"})
    events: list[Event] = [
        event
        for index in range(3)
        for event in (ToolCallStart(index, "f"), ToolArgumentsDelta(index, '{"input": "a"}'), ToolCallEnd(index))
    ]
    told = [event for event in calls.translate(events, last=True) if isinstance(event, ToolArgumentsDelta)]
    assert told == [ToolArgumentsDelta(index, "a", custom=True) for index in range(3)]
