"""Calls written as JSON: one object with a name and its arguments, or an array of such."""

from collections.abc import Callable

from tercet.frontend.parsers.json_scan import copy_string, copy_value, ignore, read_string
from tercet.frontend.parsers.reader import LONGEST_NAME, Emit, MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink

_ARGUMENTS = ("arguments", "parameters")
BARE_CALL = r'\{\s*"(name|type|id|arguments|parameters)"\s*:'
"""How an object begins that may be a call where no marker says so."""


class _Fields:
    """What is known of a call before its arguments are written out."""

    name: str | None = None
    id: str | None = None
    early: str | None = None
    """Arguments that came before the name."""


def read_call(
    reader: Reader, sink: Sink, admits: Callable[[str], bool] = lambda _: True, *, bare: bool = False
) -> Steps[None]:
    """One call object; the reader holds. Arguments are streamed once the name is known, whatever the order of keys.

    `bare` means that no marker said a call would follow: only objects with a name that `admits` and with arguments
    are calls then. Raises MalformedError: while the reader still holds, nothing was emitted; afterwards the call is
    open, and what its arguments said so far is out.
    """
    fields = _Fields()
    yield from reader.expect("{")
    while (yield from reader.solid()) == '"':
        key = yield from read_string(reader)
        yield from reader.solid()
        yield from reader.expect(":")
        yield from reader.solid()
        if key in _ARGUMENTS and fields.name is not None:
            yield from _start_with_arguments(reader, sink, fields)
            sink.end()
            return (yield from _skip_rest(reader))
        yield from _read_field(reader, key, fields, bare=bare)
        if key == "name" and not admits(fields.name or ""):
            raise MalformedError
        yield from reader.solid()
        if not (yield from reader.accept(",")):
            break
    yield from reader.solid()
    yield from reader.expect("}")
    if fields.name is None or (bare and fields.early is None):
        raise MalformedError
    reader.commit()
    sink.start(fields.name, fields.id)
    sink.arguments(fields.early or "{}")
    return sink.end()


def _read_field(reader: Reader, key: str, fields: _Fields, *, bare: bool) -> Steps[None]:
    if key == "name" and fields.name is None:
        fields.name = yield from read_string(reader)
        if not 0 < len(fields.name) <= LONGEST_NAME:
            raise MalformedError
    elif key == "id" and (yield from reader.peek()) == '"':
        fields.id = yield from read_string(reader)
    elif key in _ARGUMENTS and fields.early is None:
        parts: list[str] = []
        yield from copy_arguments(reader, parts.append)
        fields.early = "".join(parts)
    elif bare and key not in {"type", "id"}:
        raise MalformedError
    else:
        yield from copy_value(reader, ignore)


def _start_with_arguments(reader: Reader, sink: Sink, fields: _Fields) -> Steps[None]:
    assert fields.name is not None
    if (yield from reader.peek()) in {"{", "["}:
        reader.commit()
        sink.start(fields.name, fields.id)
        yield from copy_value(reader, sink.arguments)
        return
    parts: list[str] = []
    yield from copy_arguments(reader, parts.append)
    reader.commit()
    sink.start(fields.name, fields.id)
    sink.arguments("".join(parts))


def copy_arguments(reader: Reader, emit: Emit) -> Steps[None]:
    """Emit arguments as JSON text: an object as it is written, a string as what it says, null as none."""
    char = yield from reader.peek()
    if char == '"':
        emit((yield from read_string(reader)) or "{}")
    elif char == "n":
        yield from reader.expect("null")
        emit("{}")
    else:
        yield from copy_value(reader, emit)


def _skip_rest(reader: Reader) -> Steps[None]:
    """What follows the arguments in a call's object; nothing in it matters, and its brace may be missing."""
    while (yield from reader.solid()) == ",":
        reader.take()
        if (yield from reader.solid()) != '"':
            break
        yield from copy_string(reader, ignore)
        yield from reader.solid()
        yield from reader.expect(":")
        yield from reader.solid()
        yield from copy_value(reader, ignore)
    yield from reader.accept("}")


def read_calls(
    reader: Reader, sink: Sink, admits: Callable[[str], bool] = lambda _: True, *, bare: bool = False
) -> Steps[None]:
    """An array of call objects; the reader holds. Raises MalformedError as `read_call` does."""
    yield from reader.expect("[")
    while True:
        yield from reader.solid()
        yield from read_call(reader, sink, admits, bare=bare)
        reader.hold()
        yield from reader.solid()
        if (yield from reader.accept("]")):
            return reader.commit()
        yield from reader.expect(",")


def read_arguments(reader: Reader, sink: Sink, ends: Markers, *, text: bool = False) -> Steps[str]:
    """The open call's arguments where they stand alone, before an end marker.

    Arguments that turn out not to be JSON go on, as they are written, to the marker, which is then returned. So do
    those that may be any `text`, which may begin as JSON does: with a word, say, or a list.
    """
    first = yield from reader.solid()
    try:
        yield from copy_value(reader, sink.arguments)
        complete = not text or (first == "{" and not (yield from reader.peek()))
    except MalformedError:
        complete = False
    marker = "" if complete else (yield from reader.until(ends, sink.arguments))
    if complete or marker:
        sink.end()
    return marker
