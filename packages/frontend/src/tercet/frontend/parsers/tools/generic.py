"""Models that were not taught a notation: a bare JSON array of call objects, or one such object.

The form that required and named calls take where the model has no form of its own. Where tools are known only their
names make an object a call; everything else is text.
"""

from tercet.frontend.parsers.port import ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_object import BARE_CALL, read_call, read_calls

_BEGIN = Markers("[", "{")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Text and calls."""
    while (yield from reader.find(_BEGIN, sink.text)):
        reader.hold()
        try:
            if (yield from reader.peek()) == "[":
                yield from read_calls(reader, sink, tools.admits, bare=True)
            else:
                yield from read_call(reader, sink, tools.admits, bare=True)
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
        also_begins=(BARE_CALL,),
    ),
    grammar=read,
)
