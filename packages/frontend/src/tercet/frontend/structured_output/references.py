"""References of JSON schemas: their targets, and those that lead back to themselves without a value in between."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from tercet.frontend.errors import BadRequestError

Schema = dict[str, Any]
_INDEX_DIGITS = 9
_PATH_NAME = 64
"""Characters of a name in a path. Every schema inside a member repeats its path, so it must not grow with the name."""


def member_path(path: str, name: str) -> str:
    """Return the path of a member of an object at `path`, its name shortened if it is long."""
    return f"{path}.{name[:_PATH_NAME]}"


class Reference(NamedTuple):
    """Target of a reference: a schema and its path, as people write it."""

    schema: Any
    path: str


class References:
    """Resolver of the references within one schema, whose path is `place`."""

    def __init__(self, root: object, place: str = "") -> None:
        self._root = Reference(root, place)
        self._named: dict[str, Reference] | None = None

    def resolve(self, reference: str) -> Reference | None:
        """Return the target of a reference, or None.

        A reference is a JSON pointer, an anchor, or a pointer after the `$id` of a schema within the root.
        """
        base, _, fragment = reference.partition("#")
        pointer = not fragment or fragment.startswith("/")
        name = base if pointer else f"#{fragment}"
        found = self._root if not name else self._by_name().get(name)
        if found is None:
            return None
        value, path = found
        for step in unquote(fragment).split("/")[1:] if pointer else ():
            key = step.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and key in value:
                value, path = value[key], member_path(path, key)
            elif isinstance(value, list) and key.isdecimal() and int(key[:_INDEX_DIGITS]) < len(value):
                value, path = value[int(key[:_INDEX_DIGITS])], f"{path}[{key}]"
            else:
                return None
        return Reference(value, path) if isinstance(value, dict | bool) else None

    def _by_name(self) -> dict[str, Reference]:
        """Return every object with an `$id` or an anchor, by `$id` and by anchor after "#"."""
        if self._named is None:
            self._named, waiting = {}, [self._root]
            while waiting:
                value, path = waiting.pop()
                if isinstance(value, dict):
                    for name in _names(value):
                        self._named.setdefault(name, Reference(value, path))
                    waiting += [Reference(inner, member_path(path, key)) for key, inner in value.items()]
                elif isinstance(value, list):
                    waiting += [Reference(inner, f"{path}[{at}]") for at, inner in enumerate(value)]
        return self._named


def _names(schema: Schema) -> Iterator[str]:
    for keyword in ("$id", "id"):
        if isinstance(name := schema.get(keyword), str) and name:
            yield name if name.startswith("#") else name.rstrip("#")
    for keyword in ("$anchor", "$dynamicAnchor"):
        if isinstance(name := schema.get(keyword), str):
            yield f"#{name}"


def check_references(root: object, schemas: Iterable[tuple[str, Any]], param: str) -> None:
    """Raise BadRequestError for the first of the `schemas`, each with its path, that refers to itself.

    A schema that contains itself in a property or an item is allowed, because there is a value in between.
    """
    settled: set[int] = set()
    references = References(root)
    for path, start in schemas:
        if not isinstance(start, dict) or id(start) in settled:
            continue
        above, trail = {id(start)}, [(start, _subschemas_of_same_value(start, references))]
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
                trail.append((other, _subschemas_of_same_value(other, references)))


def _subschemas_of_same_value(schema: Schema, references: References) -> Iterator[Schema]:
    """Yield the schemas that the same value must match, too."""
    if isinstance(text := schema.get("$ref"), str) and (found := references.resolve(text)):
        yield from _only_schemas([found.schema])
    if isinstance(every := schema.get("allOf"), list):
        yield from _only_schemas(every)
    for keyword in ("anyOf", "oneOf"):
        if isinstance(some := schema.get(keyword), list) and len(some) == 1:
            yield from _only_schemas(some)


def _only_schemas(values: Iterable[object]) -> Iterator[Schema]:
    return (each for each in values if isinstance(each, dict))
