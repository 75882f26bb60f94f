"""Calls as Python writes them, `name(key=value)`: in a list, or each on a line of its own between tags.

A call is text until its first keyword; a call that stops being Python later stays open, and the rest is text.
"""

import json
import re

import msgspec

from tercet.frontend.parsers.port import Grammar, Tools
from tercet.frontend.parsers.python_scan import copy_literal
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import next_marker, read_blocks

_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_KEY = re.compile(r"\w+")


class PythonMarks(msgspec.Struct, frozen=True, kw_only=True):
    """Markers of one notation."""

    begin: str
    end: str
    bare: bool = False
    """A list may stand without the markers; if tools are known, it must begin with the name of one."""
    lines: bool = False
    """Calls are lines, not a list."""


def python_calls(marks: PythonMarks) -> Grammar:
    """Return the grammar that reads text and calls between these markers."""
    begin = Markers(f"\n{marks.begin}", marks.begin, *(["["] if marks.bare else []))

    def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
        def block(marker: str) -> Steps[None]:
            if marker == "[":
                reader.hold(marker, sign="")
                return (yield from _read_list(reader, sink, marks, tools))
            if not marks.lines:
                yield from reader.peek_solid()
                yield from reader.expect("[")
            yield from _read_list(reader, sink, marks, None)
            yield from next_marker(reader, sink, marks.end)
            return reader.commit()

        yield from read_blocks(reader, sink, begin, block)

    return read


def _read_list(reader: Reader, sink: Sink, marks: PythonMarks, bare: Tools | None) -> Steps[None]:
    while True:
        yield from reader.peek_solid()
        name = yield from reader.run(_NAME)
        yield from reader.peek_solid()
        if bare is not None and (bare.begins(name) if reader.exhausted else bare.admits(name)):
            reader.announce()
        yield from reader.expect("(")
        if not name or not (bare is None or bare.admits(name)):
            raise MalformedError
        yield from _read_arguments(reader, sink, name)
        reader.hold()
        char = yield from reader.peek_solid()
        if marks.lines:
            if char in ("", "<"):
                return
            yield from reader.accept(",")
            continue
        if (yield from reader.accept("]")):
            return reader.commit()
        yield from reader.expect(",")


def _read_arguments(reader: Reader, sink: Sink, name: str) -> Steps[None]:
    opener = "{"
    while (yield from reader.peek_solid()) != ")":
        key = yield from reader.run(_KEY)
        yield from reader.peek_solid()
        yield from reader.expect("=")
        if not key:
            raise MalformedError
        if not sink.open:
            reader.commit()
            sink.start(name)
        sink.arguments(opener + json.dumps(key, ensure_ascii=False) + ": ")
        opener = ", "
        yield from copy_literal(reader, sink.arguments)
        if (yield from reader.peek_solid()) != ")":
            yield from reader.expect(",")
    reader.next_char()
    if not sink.open:
        reader.commit()
        sink.start(name)
    sink.arguments("{}" if opener == "{" else "}")
    sink.end()
