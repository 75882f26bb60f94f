"""Calls as `<invoke name="...">` elements with one `<parameter name="...">` for each argument, in a section.

MiniMax-M2, DeepSeek V3.2 and V4, and Step 3 have tags of this form, each with a prefix of its own. Values are as the
template writes them: strings as they are, others as JSON; white space around a value belongs to a string. A section may
be missing around a call where its own tag identifies it.
"""

import re

import msgspec

from tercet.frontend.parsers.port import Grammar, Style, ToolFormat, ToolFraming, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import next_marker, read_blocks
from tercet.frontend.parsers.tools.tagged.tagged_arguments import ArgumentsWriter
from tercet.frontend.parsers.typed_value import LITERAL, STRING, UNKNOWN

_NAME = re.compile(r"[^\"<>\n]+")


class InvokeTags(msgspec.Struct, frozen=True, kw_only=True):
    """Tags of one notation."""

    begin: str
    end: str
    prefix: str = ""
    """Namespace of `invoke` and `parameter`."""
    before: str = ""
    behind: str = ""
    """Markers around each call."""
    typed: bool = False
    """A parameter says with `string="true"` or `string="false"` if its value is a string or JSON."""
    special_tokens: bool = False

    @property
    def call(self) -> str:
        """Return the beginning of a call's tag."""
        return f'{self.before}<{self.prefix}invoke name="'

    @property
    def call_end(self) -> str:
        """Return the end of a call."""
        return f"</{self.prefix}invoke>"

    @property
    def key(self) -> str:
        """Return the beginning of a parameter's tag."""
        return f'<{self.prefix}parameter name="'

    @property
    def key_end(self) -> str:
        """Return the end of a parameter."""
        return f"</{self.prefix}parameter>"


def invoke_format(tags: InvokeTags) -> ToolFormat:
    """Return the notation with these tags."""
    return ToolFormat(
        framing=ToolFraming(
            begin=f"{tags.begin}\n",
            prefix=f'{tags.call}$name">\n',
            suffix=f"{tags.call_end}{tags.behind}\n",
            end=tags.end,
            style=Style.TAGGED,
            key_prefix=f'{tags.key}$key"' + (' string="' if tags.typed else ">"),
            string_begin='true">' if tags.typed else "",
            other_begin='false">' if tags.typed else "",
            key_suffix=f"{tags.key_end}\n",
            key_excludes='"',
            trigger=tags.begin,
            extra_begins=(tags.call,) if tags.prefix else (),
            special_tokens=tags.special_tokens,
        ),
        grammar=_grammar(tags),
    )


def _grammar(tags: InvokeTags) -> Grammar:
    begin = Markers.with_breaks(tags.begin, *([tags.call] if tags.prefix else []))
    value_end = Markers(tags.key_end)

    def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:
        def section(marker: str) -> Steps[None]:
            if marker.endswith(tags.begin):
                yield from reader.peek_solid()
                yield from reader.expect(tags.call)
            yield from _read_section(reader, sink, tools, tags, value_end)

        yield from read_blocks(reader, sink, begin, section)

    return read


def _read_section(reader: Reader, sink: Sink, tools: Tools, tags: InvokeTags, value_end: Markers) -> Steps[None]:
    """Read calls, the first from its name, up to the section's end or to text that is not a call."""
    after = (tags.call, tags.end)
    marker = tags.call
    while marker == tags.call:
        name = yield from _read_name(reader)
        yield from reader.expect(">")
        reader.commit()
        sink.start(name)
        yield from _read_parameters(reader, tags, ArgumentsWriter(sink, tools.schema(name), UNKNOWN), value_end)
        marker = yield from next_marker(reader, sink, *([tags.behind] if tags.behind else []), *after)
        if marker and marker == tags.behind:
            marker = yield from next_marker(reader, sink, *after)
    reader.commit()


def _read_name(reader: Reader) -> Steps[str]:
    name = (yield from reader.run(_NAME)).strip()
    yield from reader.expect('"')
    if not name:
        raise MalformedError
    yield from reader.spaces()
    return name


def _read_parameters(reader: Reader, tags: InvokeTags, arguments: ArgumentsWriter, value_end: Markers) -> Steps[None]:
    while True:
        yield from reader.peek_solid()
        tag = yield from reader.accept_any(tags.key, tags.call_end)
        if tag == tags.call_end:
            return arguments.close()
        if not tag:
            raise MalformedError
        key = yield from _read_name(reader)
        types = None
        if tags.typed and (kind := (yield from reader.accept_any('string="true"', 'string="false"'))):
            types = STRING if kind == 'string="true"' else LITERAL
            yield from reader.spaces()
        yield from reader.expect(">")
        yield from arguments.read_value(reader, key, value_end, types)
