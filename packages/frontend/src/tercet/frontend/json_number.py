"""JSON whose numbers keep their digits: those that neither a double nor 64 bits hold stay texts within `JsonNumber`."""

import json
import math
import re
import secrets
from collections.abc import Iterator
from decimal import Context, Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, Self

import orjson

_DIGITS = bytes.maketrans(b"123456789.E+", b"0000000000e-")
_SIGNS_OF_LONG = (b"0" * 16, b"0e000", b"0e-000")
"""Parts of a long number after `_DIGITS`, which makes all digits 0."""
_BEFORE_NUMBERS = b"[,: \n\r\t"
_MOST_HEAD = 64
OVERLAP = _MOST_HEAD + 16
_MOST_FALSE_SIGNS = 1000
"""Signs of long numbers within strings, after which a text counts as one with long numbers."""
_MOST_LONG = 65_536
"""Numbers of a text whose digits are compared with those of a double, which takes microseconds for each."""
_64_BITS = range(-(2**63), 2**64)
_MOST_EXPONENT = 400
_MOST_INT_DIGITS = 20
_EXACT_CHARS = 16
_NORMAL = (1e-300, 1e300)
"""A number in this range of at most 15 digits, and so of `_EXACT_CHARS` characters, is that of its nearest double."""
_EXACT = Context(prec=1000)


class JsonNumber(float):
    """Number of a JSON text that no double and no integer of 64 bits equals. Its value as a float is the nearest."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __getnewargs__(self) -> tuple[str]:  # type: ignore[override]
        return (self.text,)

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__


class _TooManyError(Exception):
    """A text has more than `_MOST_LONG` long numbers."""


def parse_json(text: bytes | bytearray | str, *, plain: bool = False) -> Any:
    """Parse standard JSON. Raises orjson.JSONDecodeError, a ValueError, for any other text.

    In a text with more than `_MOST_LONG` long numbers, all are doubles, and one beyond their range is an error. The
    caller of a `plain` text knows that no part of it `may_have_long_numbers`.
    """
    data = text.encode() if isinstance(text, str) else text
    if plain or not may_have_long_numbers(data):
        return orjson.loads(data)
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if "infinity" not in error.msg:
            raise
    numbers = _NumberParser()
    try:
        value = json.loads(data, parse_int=numbers.integer, parse_float=numbers.decimal, parse_constant=_refuse)
        dump_json(value)  # refuses unpaired surrogates
    except _TooManyError:
        return orjson.loads(data)
    except json.JSONDecodeError as error:
        raise orjson.JSONDecodeError(error.msg, error.doc, error.pos) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise orjson.JSONDecodeError(str(error), "", 0) from None
    return value


def dump_json(value: object) -> bytes:
    """Return a value as JSON, its numbers with all digits."""
    return orjson.dumps(value, default=_fragment)


def json_text(value: object, **options: Any) -> str:
    """Return a value as `json.dumps` with these options writes it, its numbers with all digits."""
    if not any(isinstance(each, JsonNumber) for each in _scalars(value)):
        return json.dumps(value, **options)
    mark = secrets.token_hex(16)
    marked = json.dumps(_marked(value, mark), **options)
    return re.sub(f'"{mark}([^"]*)"', lambda found: found[1], marked)


def exact_number(value: object) -> Fraction:
    """Return a JSON number exactly; a double counts as the shortest digits that mean it. Beyond 1e400, it is 1e400;
    digits after the thousandth do not count.

    Raises ValueError for another value.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    if not isinstance(value, JsonNumber):
        return Fraction(value if isinstance(value, int) else Decimal(repr(value)))
    digits, _, exponent = value.text.lower().partition("e")
    sign, figures, power = _EXACT.create_decimal(digits).as_tuple()
    assert isinstance(power, int)
    power += int(exponent[:_MOST_INT_DIGITS] or 0)
    number = int("".join(map(str, figures)))
    place = len(figures) + power
    if number and abs(place) > _MOST_EXPONENT:
        number, power = 1, _MOST_EXPONENT if place > 0 else -_MOST_EXPONENT
    return (-1 if sign else 1) * number * Fraction(10) ** (power if number else 0)


def may_have_long_numbers(data: bytes | bytearray, first: int = 0) -> bool:
    """Return whether a number outside strings may have 16 digits or a large exponent. Fast.

    Of a part of a text, numbers that become long before `first` are those of the part before, which it overlaps by
    `OVERLAP` bytes.
    """
    marks, tried = data.translate(_DIGITS), 0
    for sign in _SIGNS_OF_LONG:
        at = marks.find(sign, max(0, first - len(sign) + 1))
        while at >= 0:
            head = marks[max(0, at - _MOST_HEAD) : at]
            begin = at - len(head) + len(head.rstrip(b"0-"))
            tried += 1
            if begin == max(0, at - _MOST_HEAD) or tried > _MOST_FALSE_SIGNS or data[begin - 1] in _BEFORE_NUMBERS:
                return True
            at = marks.find(sign, at + len(sign))
    return False


class _NumberParser:
    """Parser of the numbers of one text."""

    def __init__(self) -> None:
        self._left = _MOST_LONG

    def integer(self, text: str) -> int | JsonNumber:
        if len(text) < _MOST_INT_DIGITS:
            return int(text)
        self._count()
        if len(text) > _MOST_INT_DIGITS or int(text) not in _64_BITS:
            return JsonNumber(text)
        return int(text)

    def decimal(self, text: str) -> float:
        """Return a double of which the shortest digits mean the number, otherwise a `JsonNumber`."""
        value = float(text)
        if len(text) <= _EXACT_CHARS and _NORMAL[0] < abs(value) < _NORMAL[1]:
            return value
        if repr(value) == text:
            return value
        self._count()
        try:
            exact = math.isfinite(value) and Decimal(repr(value)) == Decimal(text)
        except InvalidOperation:  # an exponent of many digits
            exact = False
        return value if exact else JsonNumber(text)

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _TooManyError


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _fragment(value: object) -> orjson.Fragment:
    if isinstance(value, JsonNumber):
        return orjson.Fragment(value.text)
    raise TypeError(f"{type(value).__name__} is no JSON")


def _scalars(value: object) -> Iterator[object]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
        else:
            yield each


def _marked(value: object, mark: str) -> object:
    """Return a copy in which numbers with a text are strings of the mark and that text."""
    match value:
        case JsonNumber(text=text):
            return mark + text
        case dict():
            return {key: _marked(each, mark) for key, each in value.items()}
        case list() | tuple():
            return [_marked(each, mark) for each in value]
    return value
