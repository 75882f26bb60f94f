"""Apertus: a JSON array between `<|tools_prefix|>` and `<|tools_suffix|>`, each call an object keyed by its tool.

Source: the chat template of swiss-ai/Apertus-8B-Instruct-2509, which writes `[{"name": {...}}, ...]`.
"""

from tercet.frontend.parsers.json_scan import copy_value, read_string
from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MAX_NAME_CHARS, MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink

_BEGIN, _END = "<|tools_prefix|>", "<|tools_suffix|>"
_BEGINS = Markers(f"\n{_BEGIN}", _BEGIN)


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:  # noqa: ARG001
    """Read text and blocks of calls."""
    while marker := (yield from reader.until(_BEGINS, sink.text)):
        reader.hold(marker)
        try:
            yield from _read_array(reader, sink)
        except MalformedError:
            sink.text(reader.release())


def _read_array(reader: Reader, sink: Sink) -> Steps[None]:
    yield from reader.peek_solid()
    yield from reader.expect("[")
    more = True
    while more:
        yield from reader.peek_solid()
        yield from reader.expect("{")
        yield from reader.peek_solid()
        name = yield from read_string(reader)
        yield from reader.peek_solid()
        yield from reader.expect(":")
        if not 0 < len(name) <= MAX_NAME_CHARS or (yield from reader.peek_solid()) != "{":
            raise MalformedError
        reader.commit()
        sink.start(name)
        yield from copy_value(reader, sink.arguments)
        sink.end()
        reader.hold()
        yield from reader.peek_solid()
        yield from reader.expect("}")
        yield from reader.peek_solid()
        more = yield from reader.accept(",")
    yield from reader.expect("]")
    yield from reader.peek_solid()
    yield from reader.accept(_END)
    reader.commit()


FORMAT = ToolFormat(
    framing=ToolFraming(
        begin=f"{_BEGIN}[",
        prefix='{"$name": ',
        suffix="}",
        separator=", ",
        end=f"]{_END}",
        trigger=_BEGIN,
        special_tokens=True,
    ),
    grammar=read,
)
