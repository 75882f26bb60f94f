"""Checks of JSON schemas: size, references, and OpenAI's rules for strict schemas."""

from collections.abc import Iterator
from typing import Any

from tercet.frontend.errors import BadRequestError
from tercet.frontend.json_number import dump_json
from tercet.frontend.structured_output.limits import MAX_DEPTH, MAX_NODES
from tercet.frontend.structured_output.references import check_references, member_path
from tercet.frontend.structured_output.schema_writer import SchemaWriter

_ONE = frozenset({"items", "additionalItems", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions"})

_WHITE_SPACE = r" |\r?\n[ \t]{0,32}"
"""Between values: a space, or a line break and indentation. It is bounded, or a model could generate it without end."""

_Place = tuple[str, Any]
"""A path as people write it, and the value at that path."""


def schema_text(
    schema: dict[str, Any] | bool, param: str, *, strict: bool = False, lenient: bool = False, rust: bool = False
) -> str:
    """Return a checked schema as llguidance reads it, with bounded white space.

    A lenient one is enforced as far as possible. Otherwise raises BadRequestError that names the keyword that cannot be
    enforced; a strict one has no unknown keywords, either. With `rust`, patterns are in Rust's syntax.
    """
    guidance: dict[str, Any] = {"whitespace_pattern": _WHITE_SPACE}
    if lenient:
        guidance["lenient"] = True
    written = SchemaWriter(schema, param, strict=strict, lenient=lenient, rust=rust).written()
    return dump_json({"x-guidance": guidance, **written}).decode()


def check_schema(schema: dict[str, Any] | bool, param: str, *, strict: bool) -> None:
    """Raise BadRequestError for a schema without a meaning, or the rule that a strict schema breaks."""
    _check_size(schema, param)
    if schema is False:
        raise BadRequestError("The schema 'false' allows no answer.", param=param)
    if strict and (not isinstance(schema, dict) or schema.get("type") != "object" or "anyOf" in schema):
        raise BadRequestError("A strict schema must be of 'type' 'object', without 'anyOf' at its root.", param=param)
    places = list(subschemas(schema, param))
    for path, each in places:
        if isinstance(each, bool):
            continue
        if not isinstance(each, dict):
            raise BadRequestError(f"Invalid schema at '{path}': an object or a boolean is needed.", param=param)
        if strict:
            _check_strict(each, path, param)
    check_references(schema, places, param)


def _check_size(schema: object, param: str) -> None:
    """Refuse a schema that is too large for the walks that follow."""
    nodes, level = 0, [schema]
    for _ in range(MAX_DEPTH):
        nodes += len(level)
        if nodes > MAX_NODES:
            raise BadRequestError(f"The schema has more than {MAX_NODES} values.", param=param)
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            return
    raise BadRequestError(f"The schema is nested deeper than {MAX_DEPTH} levels.", param=param)


def _inside(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def subschemas(schema: object, path: str) -> Iterator[_Place]:
    """Yield a schema and every schema inside it; data such as `const` is skipped."""
    waiting = [(path, schema)]
    while waiting:
        path, value = waiting.pop()
        yield path, value
        if not isinstance(value, dict):
            continue
        for keyword, inner in value.items():
            below = member_path(path, keyword)
            if keyword in _MAPS and isinstance(inner, dict):
                waiting += [(member_path(below, name), each) for name, each in inner.items()]
            elif keyword in _LISTS and isinstance(inner, list):
                waiting += [(f"{below}[{place}]", each) for place, each in enumerate(inner)]
            elif keyword in _ONE:
                waiting.append((below, inner))


def _check_strict(schema: dict[str, Any], path: str, param: str) -> None:
    kinds = schema.get("type")
    properties = schema.get("properties", {})
    if not (kinds == "object" or (isinstance(kinds, list) and "object" in kinds) or "properties" in schema):
        return
    if schema.get("additionalProperties") is not False:
        raise BadRequestError(f"'additionalProperties' must be false at '{path}' in a strict schema.", param=param)
    required = schema.get("required", [])
    missing = (
        set(properties) - {each for each in required if isinstance(each, str)}
        if _have_valid_types(properties, required)
        else ()
    )
    for name in sorted(missing):
        raise BadRequestError(f"'required' at '{path}' must name every property, also '{name}'.", param=param)


def _have_valid_types(properties: object, required: object) -> bool:
    """Return whether both are of the right types; the compiler reports others."""
    return isinstance(properties, dict) and isinstance(required, list)
