"""Calls written as JSON: one object with a name and arguments, or an array of such objects."""

from collections.abc import Callable
from functools import partial

from tercet.frontend.parsers.json_scan import copy_string, copy_value, ignore, read_string
from tercet.frontend.parsers.port import Tools
from tercet.frontend.parsers.reader import MAX_NAME_CHARS, Emit, MalformedError, Markers, Reader, Steps
from tercet.frontend.parsers.sink import Sink

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
BARE_SIGN = '{"name": "'
"""Canonical beginning of a call without a marker before it."""
BARE_CALL = r'\{\s*"(name|type|id|arguments|parameters)"\s*:'
"""Beginning of an object that may be a call without a marker before it."""


class _Fields:
    """Fields of a call that were read before its arguments are emitted."""

    name: str | None = None
    id: str | None = None
    early: str | None = None
    """Arguments that came before the name."""


def read_call(reader: Reader, sink: Sink, bare: Tools | None = None) -> Steps[None]:
    """Read one call object, while the reader holds. Arguments stream once the name is known; keys may have any order.

    `bare` means that no marker announced a call: then only objects with the name of one of these tools, and with
    arguments, are calls. Raises MalformedError. If the reader still holds then, nothing was emitted; otherwise the call
    is open and part of its arguments was emitted.
    """
    fields = _Fields()
    yield from reader.expect("{")
    while (yield from reader.peek_solid()) == '"':
        key = yield from read_string(reader)
        yield from reader.peek_solid()
        yield from reader.expect(":")
        yield from reader.peek_solid()
        if key in _ARGUMENTS and fields.name is not None:
            yield from _start_with_arguments(reader, sink, fields)
            sink.end()
            return (yield from _skip_rest(reader))
        yield from _read_field(reader, key, fields, bare)
        yield from reader.peek_solid()
        if not (yield from reader.accept(",")):
            break
    yield from reader.peek_solid()
    yield from reader.expect("}")
    if fields.name is None or (bare is not None and fields.early is None):
        raise MalformedError
    reader.commit()
    sink.start(fields.name, fields.id)
    sink.arguments(fields.early or "{}")
    return sink.end()


def _read_field(reader: Reader, key: str, fields: _Fields, bare: Tools | None) -> Steps[None]:
    if key in _NAMES and fields.name is None and (bare is None or key == "name"):
        fields.name = yield from (read_string(reader) if bare is None else _read_bare_name(reader, bare))
        if not 0 < len(fields.name) <= MAX_NAME_CHARS:
            raise MalformedError
    elif key == "id" and (yield from reader.peek()) == '"':
        fields.id = yield from read_string(reader)
    elif key in _ARGUMENTS and fields.early is None:
        parts: list[str] = []
        yield from copy_arguments(reader, parts.append)
        fields.early = "".join(parts)
    elif bare is not None and key not in {"type", "id"}:
        raise MalformedError
    else:
        yield from copy_value(reader, ignore)


def _read_bare_name(reader: Reader, tools: Tools) -> Steps[str]:
    """Return the name of one of these tools. The name, even a part of it, announces a call."""
    parts: list[str] = []
    try:
        name = yield from read_string(reader, parts.append)
    except MalformedError:
        if tools.begins("".join(parts).removeprefix('"')):
            reader.announce()
        raise
    if not tools.admits(name):
        raise MalformedError
    reader.announce()
    return name


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
    """Emit arguments as JSON text: an object as it is written, a string's content, nothing for null."""
    char = yield from reader.peek()
    if char == '"':
        emit((yield from read_string(reader)) or "{}")
    elif char == "n":
        yield from reader.expect("null")
        emit("{}")
    else:
        yield from copy_value(reader, emit)


def _skip_rest(reader: Reader) -> Steps[None]:
    """Skip the keys after the arguments in a call's object. They are ignored, and the closing brace may be missing."""
    while (yield from reader.peek_solid()) == ",":
        reader.next_char()
        if (yield from reader.peek_solid()) != '"':
            break
        yield from copy_string(reader, ignore)
        yield from reader.peek_solid()
        yield from reader.expect(":")
        yield from reader.peek_solid()
        yield from copy_value(reader, ignore)
    yield from reader.accept("}")


def read_calls(reader: Reader, sink: Sink, bare: Tools | None = None) -> Steps[None]:
    """Read an array of call objects, while the reader holds. Raises MalformedError in the same cases as `read_call`."""
    yield from read_array(reader, partial(read_call, reader, sink, bare))


def read_array(reader: Reader, call: Callable[[], Steps[None]]) -> Steps[None]:
    """Read an array of calls, while the reader holds. The reader holds again after each of them."""
    yield from reader.expect("[")
    while True:
        yield from reader.peek_solid()
        yield from call()
        reader.hold()
        yield from reader.peek_solid()
        if (yield from reader.accept("]")):
            return reader.commit()
        yield from reader.expect(",")


def read_object(reader: Reader, sink: Sink, name: str, call_id: str | None = None) -> Steps[None]:
    """Read the object that is next as a whole call's arguments, while the reader holds. Raises as `read_call` does."""
    if (yield from reader.peek_solid()) != "{":
        raise MalformedError
    reader.commit()
    sink.start(name, call_id)
    yield from copy_value(reader, sink.arguments)
    sink.end()


def read_arguments(reader: Reader, sink: Sink, ends: Markers, *, text: bool = False) -> Steps[str]:
    """Read the open call's arguments, which stand alone before an end marker, and return the marker.

    Arguments that turn out not to be JSON are emitted as they are written, up to the marker. The same holds if they may
    be plain `text`, which can begin like JSON, for example with a word or a list.
    """
    first = yield from reader.peek_solid()
    try:
        yield from copy_value(reader, sink.arguments)
        complete = not text or (first == "{" and not (yield from reader.peek()))
    except MalformedError:
        complete = False
    marker = "" if complete else (yield from reader.until(ends, sink.arguments))
    if complete or marker:
        sink.end()
    return marker
