"""Blocks of calls between markers within text: the loop and the end that most notations share."""

from collections.abc import Callable

from tercet.frontend.parsers.reader import MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink


def read_blocks(reader: Reader, sink: Sink, begins: Markers, block: Callable[[str], Steps[None]]) -> Steps[None]:
    """Read text, and a block of calls after each begin marker.

    `block` gets the marker, which is held. It commits when a call is certain, and raises MalformedError for anything
    else, which is text.
    """
    while marker := (yield from reader.until(begins, sink.text)):
        reader.hold(marker)
        try:
            yield from block(marker)
        except MalformedError:
            sink.text(reader.release())


def next_marker(reader: Reader, sink: Sink, *markers: str) -> Steps[str]:
    """Consume white space and the marker after it, and return the marker, still held; otherwise the space is text."""
    reader.hold()
    yield from reader.peek_solid()
    marker = yield from reader.accept_any(*markers)
    if not marker:
        sink.text(reader.release())
    return marker
