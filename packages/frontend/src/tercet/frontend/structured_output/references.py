"""Detection of JSON schema references that lead back to themselves without a value in between."""

from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

from tercet.frontend.errors import BadRequestError

Schema = dict[str, Any]


def check_references(root: object, schemas: Iterable[tuple[str, Any]], param: str) -> None:
    """Raise BadRequestError for the first of the `schemas`, each with its path, that refers to itself.

    A schema that contains itself in a property or an item is allowed, because there is a value in between.
    """
    settled: set[int] = set()
    for path, start in schemas:
        if not isinstance(start, dict) or id(start) in settled:
            continue
        above, trail = {id(start)}, [(start, _subschemas_of_same_value(start, root))]
        while trail:
            schema, others = trail[-1]
            other = next(others, None)
            if other is None:
                trail.pop()
                above.discard(id(schema))
                settled.add(id(schema))
            elif id(other) in above:
                raise BadRequestError(f"The '$ref' at '{path}' leads back to itself.", param=param)
            elif id(other) not in settled:
                above.add(id(other))
                trail.append((other, _subschemas_of_same_value(other, root)))


def _subschemas_of_same_value(schema: Schema, root: object) -> Iterator[Schema]:
    """Yield the schemas that the same value must match, too."""
    if isinstance(reference := schema.get("$ref"), str):
        yield from _only_schemas([_target(reference, root)])
    if isinstance(every := schema.get("allOf"), list):
        yield from _only_schemas(every)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(keyword), list) and len(some) == 1:
            yield from _only_schemas(some)


def _only_schemas(values: Iterable[object]) -> Iterator[Schema]:
    return (each for each in values if isinstance(each, dict))


def _target(reference: str, root: object) -> object:
    """Return the target of a JSON pointer, or None if it does not exist; the compilation reports that."""
    pointer, *steps = unquote(reference).split("/")
    value: object = root if pointer == "#" else None
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value
