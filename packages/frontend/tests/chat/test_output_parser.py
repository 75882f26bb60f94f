"""Parsed output does not depend on how the text was split."""

import itertools
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packages.frontend.tests.parsers.transcripts import TRANSCRIPTS, Transcript
from tercet.frontend.chat.output_parser import Call, OutputParser, ParsedMessage, merge_events, new_call_id
from tercet.frontend.manager.req_state import Update
from tercet.frontend.model.special_text import SpecialText, SpecialTexts
from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tercet.frontend.parsers.registry import ParserNames, make_parser
from tercet.protocol.messages.values import FinishReason, FinishType

STOP = FinishReason(FinishType.STOP, 0)
SPECIALS = SpecialTexts(["<|im_end|>", "<|eot|>", "[/INST]"])


def update(text: str, finish: FinishReason | None = None) -> Update:
    return Update(0, text, [], [], finish)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)]


def read(reader: OutputParser, texts: list[str]) -> ParsedMessage:
    events: list[Event] = []
    for text in texts:
        events += reader.read(update(text))
    return merge_events(events + reader.read(update("", STOP)))


def without_ids(said: ParsedMessage) -> ParsedMessage:
    return ParsedMessage(
        said.text, said.reasoning, [Call("", call.name, call.arguments, call.complete) for call in said.calls]
    )


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda transcript: transcript.title)
@settings(max_examples=5, deadline=None)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=30))
def test_streamed_is_what_the_whole_is(transcript: Transcript, cuts: list[int]) -> None:
    """Check every notation's golden transcripts."""

    def reader() -> OutputParser:
        return OutputParser(transcript.parser(), SpecialText(SPECIALS))

    whole = merge_events(reader().read(update(transcript.output, STOP)))
    streamed = read(reader(), pieces(transcript.output, cuts))
    assert without_ids(streamed) == without_ids(whole)
    assert (whole.text, whole.reasoning) == (transcript.found.text, transcript.found.reasoning)
    assert [(call.name, call.arguments) for call in whole.calls] == [
        (call.name, call.arguments) for call in transcript.found.calls
    ]
    assert all(call.id for call in streamed.calls)


@pytest.mark.parametrize(
    ("finish", "text"),
    [
        (FinishReason(FinishType.LENGTH), "Right."),
        (FinishReason(FinishType.ABORT), "Right."),
        (FinishReason(FinishType.STOP, "ther"), "Right."),
        (STOP, 'Right.\n<tool_call>\n{"name": "get_wea'),
    ],
)
def test_a_call_that_the_model_did_not_end_is_no_content(finish: FinishReason, text: str) -> None:
    reader = OutputParser(make_parser(ParserNames(None, "hermes")))
    events = reader.read(update('Right.\n<tool_call>\n{"name": "get_wea')) + reader.read(update("", finish))
    assert merge_events(events) == ParsedMessage(text)


@settings(deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(["<|im_end|>", "<|eot|>", "[/INST]", "<|", "eot|>", "a <b", "[/", "]", "\n"]), max_size=12
    ),
    cuts=st.lists(st.integers(0, 200), max_size=20),
)
@example(parts=["<|", "<|im_end|>", "eot|>"], cuts=[2, 12])  # the remaining text looks like another token
def test_special_tokens_go_wherever_they_were_cut(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    said = read(OutputParser(make_parser(ParserNames(None, "mistral")), SpecialText(SPECIALS)), pieces(text, cuts))
    assert said.text == re.sub(r"<\|im_end\|>|<\|eot\|>|\[/INST\]", "", text)


def test_special_tokens_of_reasoning_and_text_are_told_apart() -> None:
    reader = OutputParser(make_parser(ParserNames("qwen3", None)), SpecialText(SPECIALS))
    events = (
        reader.read(update("<think>hm <|e"))
        + reader.read(update("ot|>ok <|im</think>so <|im_end|>"))
        + [*reader.read(update("", STOP))]
    )
    assert merge_events(events) == ParsedMessage("so ", "hm ok <|im", [])


def test_text_without_a_parser_is_text() -> None:
    reader = OutputParser()
    assert reader.read(update("<tool_call>")) == [TextDelta("<tool_call>")]
    assert reader.read(update("", STOP)) == []


HERMES = '<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call><tool_call>{"name": "b"}</tool_call>'


def test_one_call_is_all_there_is_where_one_is_allowed() -> None:
    reader = OutputParser(make_parser(ParserNames(None, "hermes")), one_call=True)
    said = merge_events(reader.read(update(HERMES, STOP)))
    assert [(call.name, call.arguments, call.complete) for call in said.calls] == [("a", '{"x": 1}', True)]
    assert reader.calls == 1
    assert len(read(OutputParser(make_parser(ParserNames(None, "hermes"))), [HERMES]).calls) == 2


def test_every_call_has_an_id_of_its_own_and_a_models_own_is_kept() -> None:
    calls = read(OutputParser(make_parser(ParserNames(None, "hermes"))), [HERMES]).calls
    assert all(re.fullmatch(r"call_[\w-]{24}", call.id) for call in calls)
    assert calls[0].id != calls[1].id
    [short] = read(
        OutputParser(make_parser(ParserNames(None, "hermes")), one_call=True, short_ids=True), [HERMES]
    ).calls
    assert re.fullmatch("[a-zA-Z0-9]{9}", short.id)
    assert new_call_id(short=True) != new_call_id(short=True)
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}"
    [own] = read(OutputParser(make_parser(ParserNames(None, "kimi_k2"))), [kimi]).calls
    assert own.id == "functions.now:0"


def test_events_add_up_to_an_answer() -> None:
    events: list[Event] = [
        ReasoningDelta("hm"),
        TextDelta("So"),
        ToolCallStart(0, "f", "1"),
        ToolArgumentsDelta(0, '{"a"'),
        ToolArgumentsDelta(0, ": 1}"),
        ToolCallEnd(0),
        TextDelta("."),
        ToolCallStart(1, "g", "2"),
    ]
    calls = [Call("1", "f", '{"a": 1}', complete=True), Call("2", "g", "", complete=False)]
    assert merge_events(events) == ParsedMessage("So.", "hm", calls)
