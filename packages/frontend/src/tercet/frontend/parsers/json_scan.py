"""JSON as models write it, read as it arrives: structure is followed, content is left to whoever uses it."""

import json
import re

from tercet.frontend.parsers.reader import Emit, MalformedError, Reader, Steps

_OUTSIDE = re.compile(r"[\s,:0-9A-Za-z+\-.]+")
_INSIDE = re.compile(r'[^"\\]+')
_SCALAR = re.compile(r"[0-9A-Za-z+\-.]+")
_CLOSERS = {"{": "}", "[": "]"}


def ignore(text: str) -> None:
    """Emit nothing."""


def copy_string(reader: Reader, emit: Emit) -> Steps[None]:
    """Emit the string literal that stands here, as it is written. A marker within it is part of it."""
    yield from reader.expect('"')
    emit('"')
    while True:
        yield from reader.stream(_INSIDE, emit)
        char = yield from reader.peek()
        if not char:
            raise MalformedError
        emit(reader.take())
        if char == '"':
            return
        if not (yield from reader.peek()):  # after a backslash: whatever is escaped
            raise MalformedError
        emit(reader.take())


def copy_value(reader: Reader, emit: Emit) -> Steps[None]:
    """Emit the value that stands here, as it is written. Raises MalformedError where brackets do not match."""
    closers: list[str] = []
    while True:
        if closers:
            yield from reader.stream(_OUTSIDE, emit)
        char = yield from reader.peek()
        if char == '"':
            yield from copy_string(reader, emit)
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
            emit(reader.take())
        elif closers and char == closers[-1]:
            closers.pop()
            emit(reader.take())
        elif not closers and _SCALAR.match(char):
            yield from reader.stream(_SCALAR, emit)
        else:
            raise MalformedError
        if not closers:
            return


def read_string(reader: Reader) -> Steps[str]:
    """The string that stands here, decoded. Raises MalformedError for what JSON does not allow, lone surrogates too."""
    parts: list[str] = []
    yield from copy_string(reader, parts.append)
    try:
        value = json.loads("".join(parts), strict=False)
        value.encode()
    except ValueError as error:
        raise MalformedError from error
    return str(value)


def escaped(text: str) -> str:
    """Text as it stands within a JSON string literal. Pieces of a text can be escaped apart."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
