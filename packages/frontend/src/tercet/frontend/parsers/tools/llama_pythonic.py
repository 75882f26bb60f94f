"""Llama 3.2 and Llama 4: Python calls in a list, `[name(key=value), other()]`.

Source: the prompt formats of Llama 3.2 and Llama 4 in meta-llama/llama-models, whose list may stand between
`<|python_start|>` and `<|python_end|>`. If tools are known, only a list that begins with the name of a tool holds
calls. A call is text until its first keyword; a call that stops being Python later stays open, and the rest is text.
"""

import json
import re

from tercet.frontend.parsers.port import Style, ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.python_scan import copy_literal
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink

_START, _END = "<|python_start|>", "<|python_end|>"
_BEGIN = Markers(_START, "[")
_NAME = re.compile(r"[A-Za-z0-9_.\-]+")
_KEY = re.compile(r"\w+")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and lists of calls."""
    while marker := (yield from reader.until(_BEGIN, sink.text)):
        reader.hold(marker)
        try:
            if marker == _START:
                yield from reader.peek_solid()
                yield from reader.expect("[")
            yield from _read_list(reader, sink, tools)
            if marker == _START:
                yield from _accept_end(reader, sink)
        except MalformedError:
            sink.text(reader.release())


def _read_list(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    while True:
        yield from reader.peek_solid()
        name = yield from reader.run(_NAME)
        yield from reader.peek_solid()
        yield from reader.expect("(")
        if not name or not tools.admits(name):
            raise MalformedError
        yield from _read_arguments(reader, sink, name)
        reader.hold()
        yield from reader.peek_solid()
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


def _accept_end(reader: Reader, sink: Sink) -> Steps[None]:
    reader.hold()
    yield from reader.peek_solid()
    if (yield from reader.accept(_END)):
        reader.commit()
    else:
        sink.text(reader.release())


FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="[",
        prefix="$name(",
        suffix=")",
        separator=", ",
        end="]",
        style=Style.PYTHON,
        key_prefix="$key=",
        key_suffix="",
        key_separator=", ",
        trigger="[",
        extra_begins=(r"\[\s*[A-Za-z0-9_.\-]+\s*\(",),
        special_tokens=True,
    ),
    grammar=read,
)
