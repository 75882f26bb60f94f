"""Qwen3-Coder: `<function=name>` with one `<parameter=key>` block for each argument.

Source: the chat template and tool parser of Qwen/Qwen3-Coder-480B-A35B-Instruct. The rules are the parser's:
`<tool_call>` around a function may be missing; a value ends at `</parameter>`, or where the next parameter or the
function's end stands on a new line; one line break at either end of a value is not part of it; and a parameter that
the schema does not have is a string.
"""

import re

from tercet.frontend.parsers.port import Style, ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.tagged_arguments import ArgumentsWriter
from tercet.frontend.parsers.typed_value import STRING

_BEGIN = Markers("\n<tool_call>", "<tool_call>", "\n<function=", "<function=")
_NEXT, _DONE = "\n<parameter=", "\n</function>"
_VALUE_ENDS = Markers("\n</parameter>", "</parameter>", _NEXT, _DONE)
_NAME = re.compile(r"[^<>\n]+")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and calls."""
    while marker := (yield from reader.until(_BEGIN, sink.text)):
        reader.hold(marker)
        marked = marker.endswith("<tool_call>")
        try:
            if marked:
                yield from reader.peek_solid()
                yield from reader.expect("<function=")
            yield from _read_functions(reader, sink, tools, marked=marked)
        except MalformedError:
            sink.text(reader.release())


def _read_functions(reader: Reader, sink: Sink, tools: Tools, *, marked: bool) -> Steps[None]:
    again = True
    while again:
        name = (yield from reader.run(_NAME)).strip()
        yield from reader.expect(">")
        if not name or not (marked or tools.admits(name)):
            raise MalformedError
        reader.commit()
        sink.start(name)
        yield from _read_parameters(reader, ArgumentsWriter(sink, tools.schema(name), STRING))
        reader.hold()
        yield from reader.peek_solid()
        again = yield from reader.accept("<function=")
    if (yield from reader.accept("</tool_call>")):
        reader.commit()
    else:
        sink.text(reader.release())


def _read_parameters(reader: Reader, arguments: ArgumentsWriter) -> Steps[None]:
    """Read parameters up to the function's end, or up to text that is not a parameter."""
    marker = ""
    while True:
        if marker == "":
            yield from reader.peek_solid()
            marker = yield from reader.accept_any("<parameter=", "</function>")
        if not marker and not (yield from reader.peek()):
            raise MalformedError
        if not marker.endswith("<parameter="):
            return arguments.close()
        key = (yield from reader.run(_NAME)).strip()
        yield from reader.expect(">")
        yield from reader.accept("\n")
        marker = yield from arguments.read_value(reader, key, _VALUE_ENDS)
        if marker not in {_NEXT, _DONE}:
            marker = ""


FORMAT = ToolFormat(
    framing=ToolFraming(
        prefix="<tool_call>\n<function=$name>\n",
        suffix="</function>\n</tool_call>",
        separator="\n",
        style=Style.TAGGED,
        key_prefix="<parameter=$key>\n",
        key_suffix="\n</parameter>\n",
        extra_value_ends=(_NEXT, _DONE),
        trigger="<tool_call>\n<function=",
        extra_begins=("<function=",),
    ),
    grammar=read,
)
