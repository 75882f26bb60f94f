"""Calls as JSON between markers: an object with a name and arguments, or an array of such objects.

A block without a call object is text. Several objects or arrays in one block are several calls; a missing end marker or
last brace is tolerated. Arguments that stop being JSON are emitted as they are written, up to the end marker; without
an end marker in the notation the call stays open, and the rest is text.
"""

from collections.abc import Callable

import msgspec

from tercet.frontend.parsers.port import Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.json_calls.call_object import read_call, read_calls


class MarkedJson(msgspec.Struct, frozen=True):
    """Markers of one notation. `ends` is empty where calls last to the end of the answer."""

    begins: tuple[str, ...]
    ends: tuple[str, ...] = ()


def marked_json(marks: MarkedJson) -> Callable[[Reader, Sink, Tools], Steps[None]]:
    """Return the grammar that reads text and blocks of calls between these markers."""
    begin = _with_breaks(marks.begins)
    end = _with_breaks(marks.ends) if marks.ends else None

    def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:  # noqa: ARG001
        while marker := (yield from reader.until(begin, sink.text)):
            reader.hold(marker)
            try:
                yield from _read_block(reader, sink, marks.ends)
            except MalformedError:
                sink.text(reader.release())
                if sink.open and end and (yield from reader.until(end, sink.arguments)):
                    sink.end()

    return read


def _with_breaks(markers: tuple[str, ...]) -> Markers:
    """Return the markers with and without a line break before them, which belongs to the marker."""
    return Markers(*(f"\n{marker}" for marker in markers), *markers)


def _read_block(reader: Reader, sink: Sink, ends: tuple[str, ...]) -> Steps[None]:
    char = yield from reader.peek_solid()
    while True:
        yield from read_calls(reader, sink) if char == "[" else read_call(reader, sink)
        reader.hold()
        char = yield from reader.peek_solid()
        if not char or char not in "[{" or not ends:
            break
    if (yield from reader.accept_any(*ends)):
        reader.commit()
    else:
        sink.text(reader.release())
