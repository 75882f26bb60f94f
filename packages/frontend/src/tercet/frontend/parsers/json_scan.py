"""Incremental scanner for JSON as models write it: it follows the structure and copies the content unread."""

import json
import re
from collections.abc import Callable

from tercet.frontend.parsers.reader import Emit, MalformedError, Reader, Steps

_OUTSIDE = re.compile(r"[\s,:0-9A-Za-z+\-.]+")
_INSIDE = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CLOSERS = {"{": "}", "[": "]"}


def ignore(text: str) -> None:
    """Discard the text."""


def copy_string(reader: Reader, emit: Emit) -> Steps[None]:
    """Emit the string literal at the current position, as it is written. A marker inside the literal is part of it."""
    yield from reader.expect('"')
    emit('"')
    while True:
        yield from reader.stream(_INSIDE, emit)
        char = yield from reader.peek()
        if not char:
            raise MalformedError
        emit(reader.next_char())
        if char == '"':
            return
        if not (yield from reader.peek()):  # after a backslash: the escaped character
            raise MalformedError
        emit(reader.next_char())


def copy_value(reader: Reader, emit: Emit) -> Steps[None]:
    """Emit the value at the current position, as it is written. Raises MalformedError where brackets do not match."""
    closers: list[str] = []
    while True:
        if closers:
            yield from reader.stream(_OUTSIDE, emit)
        char = yield from reader.peek()
        if char == '"':
            yield from copy_string(reader, emit)
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
            emit(reader.next_char())
        elif closers and char == closers[-1]:
            closers.pop()
            emit(reader.next_char())
        elif not closers and _SCALAR.match(char):
            yield from reader.stream(_SCALAR, emit)
        else:
            raise MalformedError
        if not closers:
            return


def read_string(reader: Reader, also: Emit = ignore) -> Steps[str]:
    """Return the decoded string at the current position, and emit to `also` what was read of it, as it is written.

    Raises MalformedError for strings that JSON does not allow, including lone surrogates.
    """
    parts: list[str] = []

    def emit(text: str) -> None:
        parts.append(text)
        also(text)

    yield from copy_string(reader, emit)
    try:
        value = json.loads("".join(parts), strict=False)
        value.encode()
    except ValueError as error:
        raise MalformedError from error
    return str(value)


def copy_items(reader: Reader, emit: Emit, item: Callable[[], Steps[None]], closer: str, brackets: str) -> Steps[None]:
    """Emit a list or an object of another notation between JSON's brackets. `item` copies one item or member.

    The opener is the next character. Commas separate items, and one may stand before the closer.
    """
    reader.next_char()
    emit(brackets[0])
    first = True
    while (yield from reader.peek_solid()) != closer:
        if not first:
            emit(", ")
        first = False
        yield from item()
        if (yield from reader.peek_solid()) != closer:
            yield from reader.expect(",")
    reader.next_char()
    emit(brackets[1])


def escaped(text: str) -> str:
    """Return text as the inside of a JSON string literal. Pieces of a text can be escaped separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
