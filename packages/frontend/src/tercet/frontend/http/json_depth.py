"""The depth limit for JSON of clients that recursive code walks later, such as a chat template."""

from collections.abc import Mapping

MAX_JSON_DEPTH = 64
"""Maximum nesting of a tool's schema and of a call's arguments."""


def is_within(value: object, levels: int) -> bool:
    """Return whether a value has at most this many levels of nesting. Does not recurse."""
    inner = [value]
    for _ in range(levels + 1):
        inner = [each for value in inner for each in _inside(value)]
        if not inner:
            return True
    return False


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, list) else []
