"""Names of parameters in errors: the place of a fault in the client's JSON, without pydantic's names for branches.

Pydantic reports a location with the tag of each tagged union and the label of each other union on the way. A tag may
equal a field of the client's object, so only the schema tells which steps are keys.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

Step = int | str
Schema = Mapping[str, Any]
Definitions = Mapping[str, Schema]


def keys_of(model: type[BaseModel], location: Sequence[Step]) -> tuple[Step, ...]:
    """Return the keys and indices of a location in the client's JSON.

    Only the first one is returned for a location that the schema does not have.
    """
    schema: Schema = model.__pydantic_core_schema__
    definitions: Definitions = {}
    if schema["type"] == "definitions":
        definitions = {each["ref"]: each for each in schema["definitions"]}
        schema = schema["schema"]
    keys = _keys(schema, tuple(location), definitions)
    return tuple(location[:1]) if keys is None else keys


def joined(keys: Sequence[Step]) -> str | None:
    """Return keys and indices as `messages[0].content`; None without any."""
    path = ""
    for key in keys:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else str(key)
    return path or None


def _keys(schema: Schema, location: tuple[Step, ...], definitions: Definitions) -> tuple[Step, ...] | None:
    """Return the keys in a location; None if the schema does not have it."""
    if not location:
        return ()
    first, rest = location[0], location[1:]
    match schema["type"]:
        case "definition-ref":
            return _keys(definitions[schema["schema_ref"]], location, definitions)
        case "tagged-union":
            branch = schema["choices"].get(first)
            return None if branch is None else _keys(branch, rest, definitions)
        case "union":
            return _keys_of_union(schema, location, definitions)
        case "model-fields":
            field = next((each for name, each in schema["fields"].items() if first in _names(name, each)), None)
            if field is None:  # an unknown key
                return None if rest else location
            return _after(first, _keys(field["schema"], rest, definitions))
        case "list" if isinstance(first, int):
            return _after(first, _keys(schema["items_schema"], rest, definitions))
        case "dict":
            key_itself = rest == ("[key]",)
            return _after(first, () if key_itself else _keys(schema["values_schema"], rest, definitions))
    return _keys(schema["schema"], location, definitions) if "schema" in schema else None


def _keys_of_union(schema: Schema, location: tuple[Step, ...], definitions: Definitions) -> tuple[Step, ...] | None:
    """Return the keys in a location below a union, whose label for the branch is the first step."""
    branches = [each[0] if isinstance(each, tuple) else each for each in schema["choices"]]
    named = [each for each in branches if each["type"] == "model" and each["cls"].__name__ == location[0]]
    found = (_keys(each, location[1:], definitions) for each in named or branches)
    return next((keys for keys in found if keys is not None), None)


def _names(name: str, field: Schema) -> set[Step]:
    """Return the names of a field in JSON: its aliases, otherwise its own name."""
    alias = field.get("validation_alias", name)
    return {alias} if isinstance(alias, str) else {path[0] for path in alias}


def _after(key: Step, keys: tuple[Step, ...] | None) -> tuple[Step, ...] | None:
    return None if keys is None else (key, *keys)
