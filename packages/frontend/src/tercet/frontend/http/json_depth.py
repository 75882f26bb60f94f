"""How deep JSON of a client may be nested where it is walked by recursion afterwards, by a template for one."""

from collections.abc import Mapping

DEEPEST = 64
"""Levels of a tool's schema, or of a call's arguments."""


def is_within(value: object, levels: int) -> bool:
    """Whether a value is nested no deeper than this; found without recursion."""
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
