"""GLM 4.5 and 4.6: the tool's name, then `<arg_key>` and `<arg_value>` for each argument, between `<tool_call>` tags.

Source: the chat template of zai-org/GLM-4.5, which writes strings unquoted and other values as JSON. A value without a
known schema is JSON if it parses, otherwise a string. GLM 4.7 and 5 omit the line breaks; both forms are read.
"""

import re

from tercet.frontend.parsers.port import Style, ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import read_blocks
from tercet.frontend.parsers.tools.tagged.tagged_arguments import ArgumentsWriter
from tercet.frontend.parsers.typed_value import UNKNOWN

_BEGIN = Markers.with_breaks("<tool_call>")
_VALUE_END = Markers("</arg_value>")
_NAME = re.compile(r"[^\s<>{]+")
_KEY = re.compile(r"[^<]+")


def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    """Read text and calls."""
    yield from read_blocks(reader, sink, _BEGIN, lambda _: _read_call(reader, sink, tools))


def _read_call(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
    yield from reader.peek_solid()
    name = yield from reader.run(_NAME)
    yield from reader.peek_solid()
    tag = yield from reader.accept_any("<arg_key>", "</tool_call>")
    if not name or not tag:
        raise MalformedError
    reader.commit()
    sink.start(name)
    arguments = ArgumentsWriter(sink, tools.schema(name), UNKNOWN)
    while tag == "<arg_key>":
        key = (yield from reader.run(_KEY)).strip()
        yield from reader.expect("</arg_key>")
        yield from reader.peek_solid()
        yield from reader.expect("<arg_value>")
        yield from arguments.read_value(reader, key, _VALUE_END)
        if not (yield from reader.peek_solid()):
            raise MalformedError
        tag = yield from reader.accept_any("<arg_key>", "</tool_call>")
    arguments.close()


def _format(line: str) -> ToolFormat:
    """Return the notation with `line` behind the name and each tag."""
    return ToolFormat(
        framing=ToolFraming(
            prefix=f"<tool_call>$name{line}",
            suffix="</tool_call>",
            separator=line,
            style=Style.TAGGED,
            key_prefix=f"<arg_key>$key</arg_key>{line}<arg_value>",
            key_suffix=f"</arg_value>{line}",
            trigger="<tool_call>",
        ),
        grammar=read,
    )


FORMAT = _format("\n")
GLM47_FORMAT = _format("")
