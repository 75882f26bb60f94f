"""Incremental scanner that converts the Python literals of calls to JSON."""

import math
import re

from tercet.frontend.parsers.json_scan import copy_items, escaped
from tercet.frontend.parsers.reader import Emit, MalformedError, Reader, Steps

_MAX_DEPTH = 64
_WORD = re.compile(r"[A-Za-z_]+")
_NUMBER = re.compile(r"[0-9A-Za-z_.+\-]+")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9A-Fa-f]+")
_PLAIN = {"'": re.compile(r"[^'\\\n]+"), '"': re.compile(r'[^"\\\n]+')}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_CODES = {"x": 2, "u": 4, "U": 8}


def copy_literal(reader: Reader, emit: Emit, depth: int = 0) -> Steps[None]:
    """Emit the literal that is next as JSON: a string, number, word, list, tuple or dict with string keys."""
    if depth > _MAX_DEPTH:
        raise MalformedError
    char = yield from reader.peek_solid()
    if char in {"'", '"'}:
        yield from copy_text(reader, emit)
    elif char == "[":
        yield from copy_items(reader, emit, lambda: copy_literal(reader, emit, depth + 1), "]", "[]")
    elif char == "(":
        yield from copy_items(reader, emit, lambda: copy_literal(reader, emit, depth + 1), ")", "[]")
    elif char == "{":
        yield from copy_items(reader, emit, lambda: _copy_member(reader, emit, depth), "}", "{}")
    elif char and (char.isdigit() or char in "+-."):
        emit(_json_number((yield from reader.run(_NUMBER))))
    else:
        word = yield from reader.run(_WORD)
        if word not in _WORDS:
            raise MalformedError
        emit(_WORDS[word])


def copy_text(reader: Reader, emit: Emit) -> Steps[None]:
    """Emit the string literal in one pair of quotes at the current position as a JSON string."""
    quote = reader.next_char()
    emit('"')
    while True:
        yield from reader.stream(_PLAIN[quote], lambda text: emit(escaped(text)))
        char = yield from reader.peek()
        if char not in {quote, "\\"}:
            raise MalformedError
        reader.next_char()
        if char == quote:
            emit('"')
            return
        yield from _copy_escape(reader, emit)


def _copy_escape(reader: Reader, emit: Emit) -> Steps[None]:
    """Copy the escape after a backslash. An unknown escape keeps its backslash, as in Python."""
    char = yield from reader.peek()
    if not char:
        raise MalformedError
    reader.next_char()
    if char not in _CODES:
        emit(escaped(_ESCAPES.get(char, "\\" + char)))
        return
    digits = ""
    while len(digits) < _CODES[char]:
        if not _HEX.match((yield from reader.peek())):
            raise MalformedError
        digits += reader.next_char()
    code = int(digits, 16)
    if code > 0x10FFFF:
        raise MalformedError
    # A surrogate stays an escape: a pair of them, each escaped by the model, is one character in JSON.
    emit(f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else escaped(chr(code)))


def _json_number(text: str) -> str:
    """Return the number as JSON: as it is written if that is JSON."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        pass  # not an integer: perhaps a float
    try:
        value = float(text)
    except ValueError as error:
        raise MalformedError from error
    if not math.isfinite(value):
        raise MalformedError
    return repr(value)


def _copy_member(reader: Reader, emit: Emit, depth: int) -> Steps[None]:
    if (yield from reader.peek()) not in {"'", '"'}:
        raise MalformedError
    yield from copy_text(reader, emit)
    yield from reader.peek_solid()
    yield from reader.expect(":")
    emit(": ")
    yield from copy_literal(reader, emit, depth + 1)


def python_to_json(text: str) -> str | None:
    """Return the JSON of a text that is one Python literal, or None if it is not."""
    reader = Reader()
    reader.push(text)
    reader.end()
    parts: list[str] = []
    try:
        for _ in copy_literal(reader, parts.append):
            raise AssertionError("a literal asked for more text after the end")
        for _ in reader.spaces():
            raise AssertionError("white space asked for more text after the end")
    except MalformedError:
        return None
    return "".join(parts) if reader.exhausted else None
