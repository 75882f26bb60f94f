"""Calls as `<function=name>` with one `<parameter=key>` block for each argument, perhaps between outer tags.

The rules are those of Qwen3-Coder's own parser: the outer tags may be missing; a value ends at `</parameter>`, or where
the next parameter or the function's end stands on a new line; and a parameter that the schema does not have is a
string.
"""

import re

import msgspec

from tercet.frontend.parsers.port import Grammar, Style, ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import next_marker, read_blocks
from tercet.frontend.parsers.tools.tagged.tagged_arguments import ArgumentsWriter
from tercet.frontend.parsers.typed_value import STRING

_FUNCTION = "<function="
_NEXT, _DONE = "\n<parameter=", "\n</function>"
_NAME = re.compile(r"[^<>\n]+")


class FunctionTags(msgspec.Struct, frozen=True, kw_only=True):
    """Outer tags of one model's calls."""

    begin: str
    end: str
    breaks: bool
    """One line break at either end of a value is not part of it."""


def function_format(tags: FunctionTags) -> ToolFormat:
    """Return the notation with these outer tags."""
    line = "\n" if tags.breaks else ""
    return ToolFormat(
        framing=ToolFraming(
            prefix=f"{tags.begin}\n<function=$name>\n",
            suffix=f"</function>\n{tags.end}",
            separator="\n",
            style=Style.TAGGED,
            key_prefix=f"<parameter=$key>{line}",
            key_suffix=f"{line}</parameter>\n",
            extra_value_ends=(_NEXT, _DONE),
            trigger=f"{tags.begin}\n<function=",
            extra_begins=(_FUNCTION,),
        ),
        grammar=_grammar(tags),
    )


def _grammar(tags: FunctionTags) -> Grammar:
    begins = Markers.with_breaks(tags.begin, _FUNCTION)
    value_ends = Markers(*(["\n</parameter>"] if tags.breaks else []), "</parameter>", _NEXT, _DONE)

    def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
        def block(marker: str) -> Steps[None]:
            marked = marker.endswith(tags.begin)
            if marked:
                yield from reader.peek_solid()
                yield from reader.expect(_FUNCTION)
            yield from _read_functions(reader, sink, tools, tags, value_ends, marked=marked)

        yield from read_blocks(reader, sink, begins, block)

    return read


def _read_functions(
    reader: Reader, sink: Sink, tools: Tools, tags: FunctionTags, value_ends: Markers, *, marked: bool
) -> Steps[None]:
    marker = _FUNCTION
    while marker == _FUNCTION:
        name = (yield from reader.run(_NAME)).strip()
        yield from reader.expect(">")
        if not name or not (marked or tools.admits(name)):
            raise MalformedError
        reader.commit()
        sink.start(name)
        arguments = ArgumentsWriter(sink, tools.schema(name), STRING)
        yield from _read_parameters(reader, arguments, value_ends, breaks=tags.breaks)
        marker = yield from next_marker(reader, sink, _FUNCTION, tags.end)
    reader.commit()


def _read_parameters(reader: Reader, arguments: ArgumentsWriter, ends: Markers, *, breaks: bool) -> Steps[None]:
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
        if breaks:
            yield from reader.accept("\n")
        marker = yield from arguments.read_value(reader, key, ends)
        if marker not in {_NEXT, _DONE}:
            marker = ""
