"""Parsers never raise or lose text, give the same result for any cuts, and stay linear."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.frontend.tests.parsers.transcripts import TRANSCRIPTS, Transcript, parser_of, read
from tercet.frontend.parsers.reader import MAX_HELD_CHARS
from tercet.frontend.parsers.registry import REASONING_FORMATS, TOOL_FORMATS, ParserNames, reasoning_format

ALL = [ParserNames(tools=name) for name in TOOL_FORMATS] + [ParserNames(reasoning=name) for name in REASONING_FORMATS]
ALL += [ParserNames("qwen3", "hermes"), ParserNames("kimi_k2", "kimi_k2")]
KINDS = [ParserNames(tools=name) for name in ("generic", "llama3_json", "mistral", "hermes", "apertus", "kimi_k2")]
KINDS += [ParserNames(tools=name) for name in ("gpt_oss", "glm4", "glm", "qwen3_coder", "minimax_m2", "gemma4")]
KINDS += [ParserNames(tools=name) for name in ("llama_pythonic", "olmo3")]
KINDS += [ParserNames(reasoning=name) for name in ("qwen3", "granite", "gpt_oss")]
KINDS += [ParserNames("kimi_k2", "kimi_k2")]
"""One notation for each reader."""
every = pytest.mark.parametrize("names", ALL, ids=str)

MARKERS = [
    "<tool_call>", "</tool_call>", "<function=", "now>", "</function>", "<parameter=", "a>", "</parameter>",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "```json", "```",
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>",
    "<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>", "<minimax:tool_call>",
    "</minimax:tool_call>", '<invoke name="', '<parameter name="', '">', "</invoke>", "<｜DSML｜function_calls>",
    '<｜DSML｜invoke name="now">', '<｜DSML｜parameter name="a"', ' string="true">', ' string="false">',
    "</｜DSML｜parameter>", "</｜DSML｜invoke>", "<｜tool_call_begin｜>function<｜tool_sep｜>", "<steptml:invoke name=",
    "<|tool_call>", "call:now{", "<tool_call|>", '<|"|>', "<start_function_call>", "<escape>", "<|START_ACTION|>",
    "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
    "<response>", "</response>", "<answer>", "</answer>", "<|tool_call|>", "<|/tool_call|>", "functools",
    "<tool_calls>", "</tool_calls>", "<TOOLCALL>", "</TOOLCALL>", "<|action_start|><|plugin|>", "<|action_end|>",
    "<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>", "<|tool_call_start|>",
    "<|tool_call_end|>", "<function_calls>", "</function_calls>", "<|channel>thought", "<channel|>",
    "assistant", "analysis", " to=functions.now", "<think>", "</think>", "[THINK]", "[/THINK]",
]  # fmt: skip
PIECES = ["{", "}", "[", "]", "(", ")", '"', "'", ":", ",", "=", ";", "\\", " ", "\n", "<", "x", "é", "0", "-", "now"]
PIECES += [
    '"name"',
    '"arguments"',
    '"parameters"',
    '{"name": "now", "arguments": {',
    "functions.now:0",
    "function",
    "null",
]
ANSWER_TAGS = ("<answer>", "<response>", "<|START_RESPONSE|>")
soups = st.lists(st.sampled_from(MARKERS + PIECES), max_size=24).map("".join)


@every
@settings(max_examples=20, deadline=None)
@given(soup=soups)
def test_any_soup_reads_the_same_in_any_pieces(names: ParserNames, soup: str) -> None:
    found = read(parser_of(names), [soup])
    assert read(parser_of(names), list(soup)) == found
    bare = not any(tag in soup for tag in ANSWER_TAGS)
    if bare and not found.calls and not found.reasoning and "gpt_oss" not in (names.tools, names.reasoning):
        assert found.text.lstrip("\n") == without_empty_reasoning(names, soup).lstrip("\n")


def without_empty_reasoning(names: ParserNames, soup: str) -> str:
    """Remove reasoning tags with nothing between them, which have no events."""
    if names.reasoning is None:
        return soup
    framing = reasoning_format(names.reasoning).framing
    begin, end = framing.begin, framing.end
    bare = soup.lstrip()
    if bare.startswith(begin):
        return bare.removeprefix(begin).lstrip("\n").removeprefix(end)
    return bare.removeprefix(end) if names.reasoning == "deepseek_r1" else soup


@settings(max_examples=200, deadline=None)
@given(transcript=st.sampled_from(TRANSCRIPTS), data=st.data())
def test_damaged_transcripts_read_the_same_in_any_pieces(transcript: Transcript, data: st.DataObject) -> None:
    first, second = sorted(data.draw(st.lists(st.integers(0, len(transcript.output)), min_size=2, max_size=2)))
    damaged = transcript.output[:first] + data.draw(soups) + transcript.output[second:]
    assert read(transcript.parser(), list(damaged)) == read(transcript.parser(), [damaged])


@every
def test_plain_words_are_out_at_once(names: ParserNames) -> None:
    parser = parser_of(names, "<think>\n\n</think>\n\n")
    for word in ("Hello", " there", ",\n", "how", " are", " you?"):
        events = parser.feed(word)
        held = 1 if word.endswith("\n") else 0  # a line break may belong to the marker of a call
        assert sum(len(getattr(event, "text", "")) for event in events) >= len(word) - held


def test_a_beginning_of_a_marker_is_held_back_and_no_more() -> None:
    parser = parser_of(ParserNames(tools="hermes"))
    assert [getattr(event, "text", None) for event in parser.feed("see <tool")] == ["see "]
    assert [getattr(event, "text", None) for event in parser.feed("box> <")] == ["<toolbox> "]
    assert [getattr(event, "text", None) for event in parser.finish()] == ["<"]


def hostile(size: int) -> list[str]:
    """Return texts that a careless parser would scan repeatedly."""
    units = [
        "<", "<tool_call>", "<tool_call>{", '<tool_call>{"name": "now", "arguments": {"a": "', "{", "[", "[{",
        '{"name": ', '{"arguments": {"a": "', "[now(a=[", "[TOOL_CALLS]", "[TOOL_CALLS]now",
        "<function=save>\n<parameter=count>\n", "<tool_call>save<arg_key>count</arg_key><arg_value>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{", "<|start|>",
        '<minimax:tool_call><invoke name="now"><parameter name="', "<|tool_call>call:now{a:[", "now\n", "</response>",
        '<|tools_prefix|>[{"', "<function_calls>now(a=", "<|channel|>analysis<|message|>", "<think>", "\n", " ",
        "\\", '"', "a",
    ]  # fmt: skip
    return [unit * (size // len(unit)) for unit in units]


def seconds(names: ParserNames, text: str, step: int) -> float:
    begin = time.process_time()
    read(parser_of(names), [text[at : at + step] for at in range(0, len(text), step)])
    return time.process_time() - begin


@pytest.mark.parametrize("names", KINDS, ids=str)
def test_hostile_text_takes_linear_time(names: ParserNames) -> None:
    small, large = 2_000, 16_000
    for short, long in zip(hostile(small), hostile(large), strict=True):
        for step in (7, large):
            ratios = (seconds(names, long, step) / max(seconds(names, short, step), 0.0005) for _ in range(4))
            assert any(ratio < 8 * 2.5 for ratio in ratios), f"{long[:40]!r} in pieces of {step}"


def test_what_is_held_back_is_bounded() -> None:
    half = MAX_HELD_CHARS // 2
    early = '<tool_call>{"arguments": {"a": "' + "x" * MAX_HELD_CHARS
    parser = parser_of(ParserNames(tools="hermes"))
    assert parser.feed(early[:half]) == []
    assert sum(len(getattr(event, "text", "")) for event in parser.feed(early[half:])) == len(early)
