"""Numeric bounds of a JSON schema, rewritten so that llguidance enforces them exactly or more tightly.

llguidance reads bounds as doubles and whole numbers of 64 bits. It lets some exclusive bounds through (5 in
`exclusiveMinimum: 5, maximum: 5.5`, 1e-30 in `exclusiveMinimum: 1e-30`), rounds digits that doubles lack, and fails
beyond 64 bits. Every bound written here is inclusive and one that it reads exactly. Where the client's bound is no such
number, one next to it inside the client's interval takes its place.
"""

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import msgspec

from tercet.frontend.json_number import exact_number

LARGEST = 2**63 - 1024
"""Largest whole number that is a double and has 64 bits with a sign."""
_LONG = 10**18
"""A bound from here on needs one on the other side, too."""
_STEP = 10**-12
"""Distance of an inclusive bound from the exclusive bound that it replaces, as a part of that."""
_PLAIN = (1e-40, 1e15)
_SMALLEST = Fraction(1, 10**60)
"""Smallest distance from 0. llguidance nests a group for each zero after the point, and fails at some hundred."""
KEYWORDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})


class BoundsError(ValueError):
    """Bounds that cannot be enforced; the message completes "The bounds at ... "."""


class _Bound(msgspec.Struct, frozen=True):
    value: Fraction
    exclusive: bool

    def mirrored(self) -> "_Bound":
        return _Bound(-self.value, self.exclusive)


def rewritten_bounds(schema: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the bounds of a schema as inclusive ones that llguidance enforces.

    Raises BoundsError if it can enforce none within them, ValueError for a bound that is not a number.
    """
    if all(map(_is_plain, (schema[each] for each in KEYWORDS if each in schema))):
        return _plain_bounds(schema)
    least, most = _bound(schema, "minimum", "exclusiveMinimum"), _upper(schema)
    if least is None and most is None:
        return {}
    if _is_whole(schema.get("type")):
        return _whole(least, most)
    found: dict[str, int | float] = {}
    if least is not None:
        found["minimum"] = _inside(least, most.value if most else None)
    if most is not None:
        found["maximum"] = -_inside(most.mirrored(), -least.value if least else None)
    return _with_both_ends(found)


def _is_plain(value: object) -> bool:
    """Return whether a number is a double of a common size, for which floats suffice."""
    if type(value) is not float and type(value) is not int:
        return False
    return value == 0 or _PLAIN[0] <= abs(value) <= _PLAIN[1]


def _plain_bounds(schema: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the bounds of a schema whose bounds are plain. Shortest digits are in the order of their doubles."""
    found: dict[str, int | float] = {}
    sides = (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1))
    given = [
        [(sign * schema[name], place) for place, name in enumerate((inclusive, exclusive)) if name in schema]
        for inclusive, exclusive, sign in sides
    ]
    low, high = (max(each, default=None) for each in given)
    whole = _is_whole(schema.get("type"))
    for (inclusive, _, sign), mine, other in zip(sides, (low, high), (high, low), strict=True):
        if mine is None:
            continue
        value, exclusive = mine
        if whole:
            value = math.floor(value) + 1 if exclusive else math.ceil(value)
        elif exclusive:
            step = _STEP * (abs(value) or 1)
            room = math.inf if other is None else -other[0] - value
            value = max(value + (min(step, room / 4) if room > 0 else step), math.nextafter(value, math.inf))
        found[inclusive] = sign * value
    if whole and len(found) == len(sides) and found["minimum"] > found["maximum"]:
        raise BoundsError("allow no whole number")
    return found


def _upper(schema: Mapping[str, Any]) -> _Bound | None:
    bound = _bound(schema, "maximum", "exclusiveMaximum", sign=-1)
    return bound.mirrored() if bound else None


def _bound(schema: Mapping[str, Any], inclusive: str, exclusive: str, sign: int = 1) -> _Bound | None:
    """Return the tighter of both lower bounds; with `sign` -1, of both upper bounds, negated.

    A boolean `exclusiveMinimum`, of draft 4, makes `minimum` exclusive.
    """
    found: list[tuple[Fraction, bool]] = []
    beside = schema.get(exclusive)
    if inclusive in schema:
        found.append((sign * exact_number(schema[inclusive]), beside is True))
    if exclusive in schema and not isinstance(beside, bool):
        found.append((sign * exact_number(beside), True))
    return _Bound(*max(found)) if found else None


def _is_whole(kinds: object) -> bool:
    names = kinds if isinstance(kinds, list) else [kinds]
    return "integer" in names and "number" not in names


def _whole(least: _Bound | None, most: _Bound | None) -> dict[str, int | float]:
    """Return inclusive bounds of whole numbers."""
    low = None if least is None else _least_whole(least)
    high = None if most is None else -_least_whole(most.mirrored())
    if low is not None and high is not None and low > high:
        raise BoundsError("allow no whole number" if low - high < _LONG else "cannot be enforced")
    found: dict[str, int | float] = {}
    if low is not None:
        found["minimum"] = low
    if high is not None:
        found["maximum"] = high
    return _with_both_ends(found)


def _least_whole(bound: _Bound) -> int:
    """Return the least whole number within a lower bound that is a double."""
    least = math.floor(bound.value) + 1 if bound.exclusive else math.ceil(bound.value)
    least = max(least, -LARGEST)
    if least > LARGEST:
        raise BoundsError("are beyond 64 bits")
    rounded = float(least)
    return least if int(rounded) == least else int(_next(rounded, lambda value: Fraction(int(value)) >= least))


def _inside(bound: _Bound, other: Fraction | None) -> int | float:
    """Return an inclusive lower bound that is read exactly. `other` is the upper bound."""
    value = max(bound.value, Fraction(-LARGEST))
    if value > LARGEST:
        raise BoundsError("are beyond 64 bits")
    if value == bound.value and bound.exclusive:
        step = Fraction(_STEP) * (abs(value) or 1)
        value += step if other is None or other <= value else min(step, (other - value) / 4)
    if 0 < value < _SMALLEST:
        value = _SMALLEST
    if -_SMALLEST < value < 0:
        value = Fraction(0)
    exact = _next(float(value), lambda each: exact_number(each) >= value)
    if other is not None and exact_number(exact) > other and bound.value <= other:
        raise BoundsError("are too close to each other")
    return int(exact) if exact.is_integer() else exact


def _next(value: float, fits: Callable[[float], bool]) -> float:
    """Return the first double from `value` upwards that fits."""
    value = math.nextafter(math.nextafter(value, -math.inf), -math.inf)
    while not fits(value):
        value = math.nextafter(value, math.inf)
    return value


def _with_both_ends(found: dict[str, int | float]) -> dict[str, int | float]:
    """Add the bound on the other side to one of many digits, which llguidance needs."""
    low, high = found.get("minimum"), found.get("maximum")
    if low is not None and high is None and low >= _LONG:
        found["maximum"] = LARGEST
    if high is not None and low is None and high <= -_LONG:
        found["minimum"] = -LARGEST
    return found
