"""Conversion of arguments written as bare text to JSON values of the types that their schema allows."""

import json
import re

from tercet.frontend.parsers.json_scan import escaped
from tercet.frontend.parsers.port import Schema
from tercet.frontend.parsers.python_scan import python_to_json
from tercet.frontend.parsers.reader import MAX_HELD_CHARS, Emit

_MAX_DEPTH = 32
_MAX_SCHEMAS = 1_000
"""Schemas visited to find the types of one value, because some short schemas expand without end."""
_PYTHON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
STRING = frozenset({"string"})
UNKNOWN: frozenset[str] = frozenset()
LITERAL = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
"""All types, where the notation marks the value as JSON."""
_WHOLE = re.compile(r"-?[0-9]+\.0+")


def json_types(schema: object, root: Schema, known: dict[str, frozenset[str]] | None = None) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not say, or only after too many steps.

    References are resolved within `root`. `known` caches their types for further schemas of the same root.
    """
    return _Search(root, {} if known is None else known).json_types(schema)


class _Search:
    """Search of one schema: it visits each reference once and at most `_MAX_SCHEMAS` schemas."""

    def __init__(self, root: Schema, known: dict[str, frozenset[str]]) -> None:
        self._root = root
        self._known = known
        self._room = _MAX_SCHEMAS

    def json_types(self, schema: object, depth: int = 0) -> frozenset[str]:
        self._room -= 1
        if not isinstance(schema, dict) or depth > _MAX_DEPTH or self._room < 0:
            return UNKNOWN
        if isinstance(reference := schema.get("$ref"), str):
            return self._referenced_types(reference, depth)
        match schema.get("type"):
            case str(kind):
                return frozenset({kind})
            case list(several):
                return frozenset(kind for kind in several if isinstance(kind, str))
        if isinstance(values := schema.get("enum"), list):
            return frozenset(map(_kind, set(map(type, values))))
        if "const" in schema:
            return frozenset({_kind(type(schema["const"]))})
        for word in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(word), list):
                return self._union(branches, depth + 1)
        if isinstance(branches := schema.get("allOf"), list):
            found = (self.json_types(branch, depth + 1) for branch in branches[:_MAX_SCHEMAS])
            return next(filter(None, found), UNKNOWN)
        return UNKNOWN

    def _referenced_types(self, reference: str, depth: int) -> frozenset[str]:
        if reference not in self._known:
            self._known[reference] = UNKNOWN  # while it is visited: a schema that refers to itself has no known types
            self._known[reference] = self.json_types(_resolved(reference, self._root), depth + 1)
        return self._known[reference]

    def _union(self, branches: list[object], depth: int) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for branch in branches:
            if not (more := self.json_types(branch, depth)):
                return UNKNOWN
            found |= more
        return found


def _resolved(reference: str, root: Schema) -> object:
    place: object = root
    for step in reference.removeprefix("#/").split("/"):
        place = place.get(step) if isinstance(place, dict) else None
    return place


def _kind(python: type) -> str:
    return _PYTHON_TYPES.get(python, "null")


def to_json(text: str, allowed: frozenset[str]) -> str:
    """Return the text as JSON of an allowed type: the first type that fits, else a string.

    If no types are known, the text is JSON of any type but a string if it parses, otherwise a string.
    """
    bare = text.strip()
    lower = bare.lower()
    if allowed is LITERAL and _is_json_of(bare, allowed):
        return bare
    if lower in {"null", "none"} and ("null" in allowed or "string" not in allowed):
        return "null"
    if lower in {"true", "false"} and (not allowed or "boolean" in allowed):
        return lower
    if bare[:1] in {"{", "["}:
        for candidate in (bare, python_to_json(bare)):
            if candidate is not None and _is_json_of(candidate, allowed):
                return candidate
    elif _is_json_of(bare, allowed):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _is_json_of(text: str, allowed: frozenset[str]) -> bool:
    """Return whether the text is JSON of an allowed type other than a string."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_int=_integer, parse_float=_number)
    except (ValueError, RecursionError):
        return False
    kind = _kind(type(value))
    if allowed is LITERAL:
        return True
    if kind == "string" or not allowed:
        return kind != "string"
    return kind in allowed or (kind == "integer" and "number" in allowed)


def _integer(text: str) -> int:  # noqa: ARG001
    """Return any integer: only the kind counts, and Python refuses long ones."""
    return 0


def _number(text: str) -> int | float:
    """Return an integer for a number without a fraction, as JSON Schema has it, else any other number."""
    return 0 if _WHOLE.fullmatch(text) else 0.5


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


class ValueWriter:
    """Incremental writer of one value as JSON: a string streams, any other value is written when it is complete."""

    def __init__(self, emit: Emit, allowed: frozenset[str]) -> None:
        self._emit = emit
        self._allowed = allowed
        self._parts: list[str] | None = []
        self._room = MAX_HELD_CHARS
        if allowed == STRING:
            self._as_string()

    def add(self, text: str) -> None:
        """Add a piece of the value's text. A text that is too long to hold back is a string."""
        if self._parts is None:
            self._emit(escaped(text))
            return
        self._parts.append(text)
        self._room -= len(text)
        if self._room < 0:
            self._as_string()

    def close(self) -> None:
        """End the complete value."""
        self._emit('"' if self._parts is None else to_json("".join(self._parts), self._allowed))

    def flush_partial(self) -> None:
        """Emit the held text as it is, because the output ended within the value."""
        if self._parts is not None:
            self._emit("".join(self._parts))

    def _as_string(self) -> None:
        parts, self._parts = self._parts or [], None
        self._emit('"' + escaped("".join(parts)))
