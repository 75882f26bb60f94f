"""JSON texts with long strings, parsed in steps: the strings one piece at a time, then the rest at once.

A parser takes 2 ns for each byte of a string, so 32 MiB of prompts or images would hold up the event loop for 60 ms.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Any

import orjson

from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.json_number import parse_json

LONG = 4096
"""Minimum bytes of a string that is parsed by itself."""
PIECE = 65_536
"""Maximum bytes of a string, or number of values, in one step."""
_STRING_COST = 256
"""Bytes whose work equals that for a string of any length."""
_TEXT = re.compile(
    rb'(?:[^"\\\x80-\xff]++'
    rb"|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|\\(?!u[dD][89abAB])(?:u[0-9a-fA-F]{4}|[^u]))*+",
    re.DOTALL,
)
"""Whole characters of a string, up to its end, a fault, or a character that the searched part cuts off."""


class InvalidJsonError(ValueError):
    """Fault of a text, at the byte `at`."""

    def __init__(self, at: int) -> None:
        super().__init__(f"no JSON at byte {at}")
        self.at = at


def parse_in_steps(text: bytes | bytearray, *, plain: bool) -> Steps[Any]:
    """Parse standard JSON like `parse_json`. Raises InvalidJsonError."""
    mark = secrets.token_hex(16)
    rest, strings = bytearray(), dict[str, str]()
    cuts: list[tuple[int, int]] = []  # ends of long strings, in `rest` and in the text
    copied = at = worked = 0
    while (start := text.find(b'"', at)) >= 0:
        long, end = yield from _string(text, start + 1)
        if long is not None:
            name = f"{mark}{len(strings)}"
            strings[name] = long
            rest += text[copied : start + 1] + name.encode()
            cuts.append((len(rest), end))
            copied = end
        worked += end - at + _STRING_COST
        at = end + 1
        if worked > PIECE:
            worked = 0
            yield
    rest += text[copied:]
    yield
    try:
        value = parse_json(rest, plain=plain)
    except orjson.JSONDecodeError as error:
        place = len(error.doc[: error.pos].encode())
        shift = next((there - here for here, there in reversed(cuts) if here <= place), 0)
        raise InvalidJsonError(place + shift) from None
    yield
    return (yield from _with_strings(value, strings)) if strings else value


def _string(text: bytes | bytearray, start: int) -> Steps[tuple[str | None, int]]:
    """Return the string from `start` on, None if it is short, and the place of the quote at its end."""
    pieces: list[str] = []
    at = start
    while True:
        found = _TEXT.match(text, at, at + PIECE)
        end = at if found is None else found.end()
        closed = text[end : end + 1] == b'"'
        if closed and end - start < LONG:
            return None, end
        if end == at and not closed:
            raise InvalidJsonError(at)
        try:
            pieces.append(orjson.loads(b'"' + text[at:end] + b'"'))
        except orjson.JSONDecodeError:
            raise InvalidJsonError(at) from None
        if closed:
            return "".join(pieces), end
        at = end
        yield


def _with_strings(value: Any, strings: Mapping[str, str]) -> Steps[Any]:
    """Replace the names of strings in a parsed value, and among its keys, by the strings."""
    root = [value]
    left: list[dict[Any, Any] | list[Any]] = [root]
    while left:
        parent = left.pop()
        pairs = enumerate(parent) if isinstance(parent, list) else parent.items()
        renamed = False
        for number, (key, child) in enumerate(pairs):
            if isinstance(child, str):
                if child in strings:
                    parent[key] = strings[child]
            elif isinstance(child, dict | list):
                left.append(child)
            renamed |= key in strings
            if number % PIECE == PIECE - 1:
                yield
        if renamed and isinstance(parent, dict):
            members = [(strings.get(key, key), child) for key, child in parent.items()]
            parent.clear()
            parent.update(members)
    return root[0]
