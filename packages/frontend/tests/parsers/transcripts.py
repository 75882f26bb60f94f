"""Golden transcripts: outputs of models in their notation, and the expected events."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec

from tercet.frontend.parsers.events import (
    Event,
    ReasoningDelta,
    TextDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from tercet.frontend.parsers.port import Parser, ToolSpec
from tercet.frontend.parsers.registry import ParserNames, make_parser

_WEATHER: dict[str, object] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
}
_SAVE: dict[str, object] = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "options": {"$ref": "#/$defs/options"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
    "$defs": {"options": {"type": "object"}},
}
TOOLS = [
    ToolSpec(
        "get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    ),
    ToolSpec("now"),
    ToolSpec("time.get-now"),
    ToolSpec("save", _SAVE),
]


class Call(msgspec.Struct, frozen=True):
    name: str
    arguments: str
    id: str | None = None
    complete: bool = True


class ParsedText(msgspec.Struct, frozen=True):
    """Sum of the deltas."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = []


class Transcript(msgspec.Struct, frozen=True):
    title: str
    names: ParserNames
    prompt: str
    output: str
    found: ParsedText

    def parser(self) -> Parser:
        return parser_of(self.names, self.prompt)


def parser_of(names: ParserNames, prompt: str = "") -> Parser:
    parser = make_parser(names, TOOLS, prompt)
    assert parser is not None
    return parser


def merge_events(events: list[Event]) -> ParsedText:
    """Join deltas, and check that calls begin, continue and end in order."""
    text, reasoning = "", ""
    calls: list[Call] = []
    for event in events:
        match event:
            case TextDelta(more):
                text += more
            case ReasoningDelta(more):
                reasoning += more
            case ToolCallStart(index, name, call_id):
                assert index == len(calls)
                calls.append(Call(name, "", call_id, complete=False))
            case ToolArgumentsDelta(index, more):
                assert index == len(calls) - 1
                assert not calls[index].complete
                calls[index] = msgspec.structs.replace(calls[index], arguments=calls[index].arguments + more)
            case ToolCallEnd(index):
                assert index == len(calls) - 1
                assert not calls[index].complete
                calls[index] = msgspec.structs.replace(calls[index], complete=True)
    return ParsedText(text, reasoning, calls)


def read(parser: Parser, pieces: list[str]) -> ParsedText:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merge_events(events + parser.finish())


def _load(path: Path) -> list[Transcript]:
    file: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
    names = ParserNames(file.get("reasoning_parser"), file.get("tools"))
    assert file["source"]
    return [
        Transcript(
            title=f"{path.stem}: {case['name']}",
            names=names,
            prompt=case.get("prompt", file.get("prompt", "")),
            output=case["output"],
            found=msgspec.convert(
                {key: case[key] for key in ("text", "reasoning", "calls") if key in case}, ParsedText
            ),
        )
        for case in file["case"]
    ]


FILES = sorted((Path(__file__).parent / "golden").glob("*.toml"))
TRANSCRIPTS = [transcript for path in FILES for transcript in _load(path)]
