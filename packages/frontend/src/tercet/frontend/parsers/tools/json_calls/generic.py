"""Notation for models without one: a bare JSON array of call objects, or one such object.

Required and named calls use this form if the model has none of its own. If tools are known, only an object with the
name of a tool is a call; everything else is text.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.json_calls.call_object import BARE_CALL, BARE_SIGN, read_call, read_calls

_BEGIN = Markers("[", "{")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and calls."""
    while (yield from reader.find(_BEGIN, sink.text)):
        reader.hold(sign=BARE_SIGN if (yield from reader.peek()) == "{" else "[" + BARE_SIGN)
        try:
            if (yield from reader.peek()) == "[":
                yield from read_calls(reader, sink, tools)
            else:
                yield from read_call(reader, sink, tools)
        except MalformedError:
            sink.text(reader.release())


FORMAT = ToolFormat(
    framing=ToolFraming(
        begin="[",
        prefix='{"name": "$name", "arguments": ',
        suffix="}",
        separator=", ",
        end="]",
        trigger='[{"name": "',
        extra_patterns=(BARE_CALL,),
    ),
    grammar=read,
)
