"""Calls in a section, each between markers: a header that names the tool, then its arguments as JSON."""

from collections.abc import Callable

import msgspec

from tercet.frontend.parsers.port import Tools
from tercet.frontend.parsers.reader import Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import next_marker, read_blocks
from tercet.frontend.parsers.tools.json_calls.call_object import read_arguments

Header = tuple[str, str | None]


class Section(msgspec.Struct, frozen=True):
    """Markers of one notation, and the reader of its call headers, from `call` to the arguments."""

    begins: tuple[str, ...]
    call: str
    header: Callable[[Reader], Steps[Header]]
    call_ends: tuple[str, ...]
    ends: tuple[str, ...]


def read_sections(reader: Reader, sink: Sink, section: Section, tools: Tools) -> Steps[None]:
    """Read text and sections. A call outside of a section counts too; a call without the arguments' markers is text."""
    begin = Markers(*section.begins, section.call)
    ends = Markers(*section.call_ends, *section.ends)

    def block(marker: str) -> Steps[None]:
        if marker != section.call:
            yield from reader.peek_solid()
            yield from reader.expect(section.call)
        yield from _read_section(reader, sink, section, ends, tools)

    yield from read_blocks(reader, sink, begin, block)


def _read_section(reader: Reader, sink: Sink, section: Section, ends: Markers, tools: Tools) -> Steps[None]:
    marker = section.call
    while marker == section.call:
        name, call_id = yield from section.header(reader)
        reader.commit()
        sink.start(name, call_id)
        closed = yield from read_arguments(reader, sink, ends, text=tools.is_custom(name))
        if closed in section.ends:
            return
        after = (section.call, *section.ends)
        marker = yield from next_marker(reader, sink, *(() if closed else section.call_ends), *after)
        if marker in section.call_ends:
            marker = yield from next_marker(reader, sink, *after)
    reader.commit()
