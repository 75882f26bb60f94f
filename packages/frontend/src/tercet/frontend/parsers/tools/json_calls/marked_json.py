"""Calls as JSON between markers: an object with a name and arguments, or an array of such objects.

A block without a call object is text. Several objects or arrays in one block are several calls; a missing end marker or
last brace is tolerated. Arguments that stop being JSON are emitted as they are written, up to the end marker; without
an end marker in the notation the call stays open, and the rest is text.
"""

from collections.abc import Callable
from functools import partial

from tercet.frontend.parsers.port import Grammar, Tools
from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink
from tercet.frontend.parsers.tools.call_blocks import next_marker, read_blocks
from tercet.frontend.parsers.tools.json_calls.call_object import read_array, read_call

ReadCall = Callable[[Reader, Sink], Steps[None]]


def marked_json(begins: tuple[str, ...], ends: tuple[str, ...] = (), call: ReadCall = read_call) -> Grammar:
    """Return the grammar that reads text and blocks between these markers, each call with `call`.

    `ends` is empty where calls last to the end of the answer.
    """
    begin = Markers.with_breaks(*begins)
    end = Markers.with_breaks(*ends) if ends else None

    def read(reader: Reader, sink: Sink, tools: Tools) -> Steps[None]:  # noqa: ARG001
        def block() -> Steps[None]:
            try:
                yield from _read_block(reader, sink, ends, partial(call, reader, sink))
            except MalformedError:
                if end is None or not sink.open:
                    raise
                if (yield from reader.until(end, sink.arguments)):
                    sink.end()

        yield from read_blocks(reader, sink, begin, lambda _: block())

    return read


def _read_block(reader: Reader, sink: Sink, ends: tuple[str, ...], call: Callable[[], Steps[None]]) -> Steps[None]:
    while True:
        opener = yield from reader.peek_solid()
        yield from read_array(reader, call) if opener == "[" else call()
        marker = yield from next_marker(reader, sink, *ends)
        if marker or not ends or (yield from reader.peek()) not in {"[", "{"}:
            return reader.commit()
        reader.hold()
