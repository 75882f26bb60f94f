"""Gemma 4 and FunctionGemma: `call:name{key:value,...}` between markers, with marks around strings.

Source: the chat templates of google/gemma-4-31B-it and google/functiongemma-270m-it. Strings stand between equal marks
and are not escaped; keys are bare; other values are written as in JSON, and objects in them in this notation again.
JSON is read in its place, too.
"""

import re

import msgspec

from tercet.frontend.parsers.json_scan import copy_items, copy_string, escaped, read_string
from tercet.frontend.parsers.port import Grammar, Style, ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import Emit, MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import next_marker, read_blocks
from tercet.frontend.parsers.tools.tagged.tagged_arguments import ArgumentsWriter
from tercet.frontend.parsers.typed_value import UNKNOWN, to_json

_MAX_DEPTH = 64
_NAME = re.compile(r"[^\s{}<>:,]+")
_KEY = re.compile(r"[^{}\[\]<>:,\"]+")
_SCALAR = re.compile(r"[^{}\[\]<>,\"]+")
_MAX_SCALAR_CHARS = 8_192


class BracedMarks(msgspec.Struct, frozen=True):
    """Markers of one model."""

    begin: str
    end: str
    quote: str


def _format(marks: BracedMarks) -> ToolFormat:
    return ToolFormat(
        framing=ToolFraming(
            prefix=f"{marks.begin}call:$name{{",
            suffix=f"}}{marks.end}",
            style=Style.TAGGED,
            key_prefix="$key:",
            key_suffix="",
            key_separator=",",
            key_excludes='{}[]:,"',
            string_begin=marks.quote,
            string_end=marks.quote,
            trigger=marks.begin,
            special_tokens=True,
        ),
        grammar=_grammar(marks),
    )


def _grammar(marks: BracedMarks) -> Grammar:
    begin = Markers.with_breaks(marks.begin)
    quote = Markers(marks.quote)

    def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
        yield from read_blocks(reader, sink, begin, lambda _: _read_call(reader, sink, tools, marks, quote))

    return read


def _read_call(reader: Reader, sink: Sink, tools: Tools, marks: BracedMarks, quote: Markers) -> Steps[None]:
    yield from reader.peek_solid()
    yield from reader.expect("call:")
    name = yield from reader.run(_NAME)
    yield from reader.expect("{")
    if not name:
        raise MalformedError
    reader.commit()
    sink.start(name)
    arguments = ArgumentsWriter(sink, tools.schema(name), UNKNOWN)
    values = _Values(reader, marks.quote, quote)
    while (yield from reader.peek_solid()) != "}":
        key = yield from values.read_key()
        arguments.write_key(key)
        yield from values.copy(sink.arguments, arguments.types(key))
        if (yield from reader.peek_solid()) != "}":
            yield from reader.expect(",")
    reader.next_char()
    arguments.close()
    yield from next_marker(reader, sink, marks.end)
    reader.commit()


class _Values:
    """Reader of values, which it emits as JSON."""

    def __init__(self, reader: Reader, mark: str, quote: Markers) -> None:
        self._reader = reader
        self._mark = mark
        self._quote = quote

    def read_key(self) -> Steps[str]:
        """Return the key that is next, and consume the colon."""
        if (yield from self._reader.accept(self._mark)):
            parts: list[str] = []
            yield from self._read_marked(parts.append)
            key = "".join(parts)
        elif (yield from self._reader.peek()) == '"':
            key = yield from read_string(self._reader)
        else:
            key = (yield from self._reader.run(_KEY)).strip()
            if not key:
                raise MalformedError
        yield from self._reader.peek_solid()
        yield from self._reader.expect(":")
        return key

    def copy(self, emit: Emit, allowed: frozenset[str] = UNKNOWN, depth: int = 0) -> Steps[None]:
        """Emit the value that is next. A bare word that is no JSON is a string."""
        if depth > _MAX_DEPTH:
            raise MalformedError
        yield from self._reader.peek_solid()
        if (yield from self._reader.accept(self._mark)):
            emit('"')
            yield from self._read_marked(lambda text: emit(escaped(text)))
            emit('"')
            return
        match (yield from self._reader.peek()):
            case '"':
                yield from copy_string(self._reader, emit)
            case "{":
                yield from copy_items(self._reader, emit, lambda: self._copy_member(emit, depth), "}", "{}")
            case "[":
                yield from copy_items(self._reader, emit, lambda: self.copy(emit, depth=depth + 1), "]", "[]")
            case _:
                text = (yield from self._reader.run(_SCALAR, _MAX_SCALAR_CHARS)).strip()
                if not text:
                    raise MalformedError
                if (yield from self._reader.peek()):
                    emit(to_json(text, allowed))
                else:
                    emit(text)  # cut off

    def _read_marked(self, emit: Emit) -> Steps[None]:
        if not (yield from self._reader.until(self._quote, emit)):
            raise MalformedError

    def _copy_member(self, emit: Emit, depth: int) -> Steps[None]:
        key = yield from self.read_key()
        emit(f'"{escaped(key)}": ')
        yield from self.copy(emit, depth=depth + 1)


FORMAT = _format(BracedMarks("<|tool_call>", "<tool_call|>", '<|"|>'))
FUNCTION_GEMMA = _format(BracedMarks("<start_function_call>", "<end_function_call>", "<escape>"))
