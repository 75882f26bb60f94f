"""Calls as `<function=name>` with one `<parameter=key>` block for each argument, perhaps between outer tags.

The rules are those of Qwen3-Coder's own parser: the outer tags may be missing; a value ends at `</parameter>`, or where
the next parameter or the function's end stands on a new line; and a parameter that the schema does not have is a
string.
"""

import re

import msgspec

from tercet.frontend.parsers.port import Style, ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.tagged.tagged_arguments import ArgumentsWriter
from tercet.frontend.parsers.typed_value import STRING

_NEXT, _DONE = "\n<parameter=", "\n</function>"
_NAME = re.compile(r"[^<>\n]+")


class FunctionTags(msgspec.Struct, frozen=True, kw_only=True):
    """Outer tags of one model's calls."""

    begin: str
    end: str
    breaks: bool
    """One line break at either end of a value is not part of it."""

    @property
    def begins(self) -> Markers:
        """Return the markers that begin a call in text."""
        return Markers("\n" + self.begin, self.begin, "\n<function=", "<function=")

    @property
    def value_ends(self) -> Markers:
        """Return the markers that end a value."""
        ends = ("\n</parameter>", "</parameter>") if self.breaks else ("</parameter>",)
        return Markers(*ends, _NEXT, _DONE)


def function_format(tags: FunctionTags, *, special_tokens: bool = False) -> ToolFormat:
    """Return the notation with these outer tags."""
    line = "\n" if tags.breaks else ""

    def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
        yield from _read(reader, sink, tools, tags)

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
            extra_begins=("<function=",),
            special_tokens=special_tokens,
        ),
        grammar=read,
    )


def _read(reader: Reader, sink: Sink, tools: Tools, tags: FunctionTags) -> Steps[None]:
    begins, value_ends = tags.begins, tags.value_ends
    while marker := (yield from reader.until(begins, sink.text)):
        reader.hold(marker)
        marked = marker.endswith(tags.begin)
        try:
            if marked:
                yield from reader.peek_solid()
                yield from reader.expect("<function=")
            yield from _read_functions(reader, sink, tools, tags, value_ends, marked=marked)
        except MalformedError:
            sink.text(reader.release())


def _read_functions(
    reader: Reader, sink: Sink, tools: Tools, tags: FunctionTags, value_ends: Markers, *, marked: bool
) -> Steps[None]:
    again = True
    while again:
        name = (yield from reader.run(_NAME)).strip()
        yield from reader.expect(">")
        if not name or not (marked or tools.admits(name)):
            raise MalformedError
        reader.commit()
        sink.start(name)
        arguments = ArgumentsWriter(sink, tools.schema(name), STRING)
        yield from _read_parameters(reader, arguments, value_ends, breaks=tags.breaks)
        reader.hold()
        yield from reader.peek_solid()
        again = yield from reader.accept("<function=")
    if (yield from reader.accept(tags.end)):
        reader.commit()
    else:
        sink.text(reader.release())


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
