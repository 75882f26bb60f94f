"""Writer of JSON schemas as llguidance enforces them: equal or narrower, without annotations.

By JSON Schema 2020-12 an unknown word is an annotation, as is a format that the standard does not have. A keyword that
would change an instance and cannot be enforced is refused by name, or left out of a lenient schema.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tercet.frontend.errors import UnsupportedParameterError
from tercet.frontend.json_number import JsonNumber, exact_number
from tercet.frontend.structured_output import bounds
from tercet.frontend.structured_output.ecma_regex import PatternError, translated
from tercet.frontend.structured_output.limits import MAX_PATTERNS
from tercet.frontend.structured_output.references import Reference, References, member_path

Schema = dict[str, Any]

ANNOTATIONS = frozenset(
    {"$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "contentSchema"}
    | {"discriminator", "externalDocs", "xml", "$defs", "definitions", "$vocabulary"}
)
_UNENFORCED = frozenset(
    {"not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"}
    | {"dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"}
    | {"$dynamicRef", "$recursiveRef"}
)
_FORMATS = frozenset({"date", "duration", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_DAY_OF_30 = r"(?:0[1-9]|[12][0-9]|30)"
_DAY = rf"(?:(?:0[13578]|1[02])-(?:{_DAY_OF_30}|31)|(?:0[469]|11)-{_DAY_OF_30}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_LEAP_DAY = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LOCAL = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_LABEL = r"[A-Za-z0-9]{1,30}(?:-[A-Za-z0-9]{1,30})?"
_FORMAT_PATTERNS = {
    "time": f"^{_TIME}$",
    "date-time": f"^(?:[0-9]{{4}}-{_DAY}|{_LEAP_DAY})T{_TIME}$",
    "email": rf"^{_LOCAL}(?:\.{_LOCAL}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{0,3}}$",
}
"""Formats that llguidance reads too widely: it allows second 60 in every minute, and 65 characters before an @."""
_OTHER_FORMATS = frozenset(
    {"idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"}
    | {"relative-json-pointer", "regex"}
)
"""Formats of the standard that are not enforced. Any others are annotations."""
_COUNTS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
_SAFE = 2**53
"""Largest whole number of which every smaller one is a double."""
_MOST_COUNT = 1_000_000_000
"""Upper bounds from here on hold for every answer."""
_EMPTY: tuple[object, ...] = ({}, [], True)


class SchemaWriter:
    """Writer of one schema. Referenced schemas move to `$defs` under new names."""

    def __init__(self, root: Schema | bool, param: str, *, strict: bool, lenient: bool, rust: bool = False) -> None:
        self._root = root
        self._param = param
        self._strict = strict
        self._lenient = lenient
        self._rust = rust
        self._references = References(root, param)
        self._names: dict[int, str] = {}
        self._waiting: list[Reference] = []
        self._pattern_room = MAX_PATTERNS
        self._keywords: dict[str, Callable[[Schema, str, str], Schema]] = {
            "$ref": self._reference,
            "enum": self._constants,
            "const": self._constants,
            "pattern": self._pattern,
            "format": self._format,
            "multipleOf": self._multiple,
            "items": self._items,
            "additionalItems": self._nothing,
            "properties": self._map,
            "patternProperties": self._patterns,
            **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), self._list),
            **dict.fromkeys(_COUNTS, self._count),
            **dict.fromkeys(bounds.KEYWORDS, self._nothing),
        }

    def written(self) -> Schema:
        """Return the whole schema. Raises BadRequestError."""
        root = self._root
        if isinstance(root, dict):
            self._names[id(root)] = "#"
        whole = self._schema(root, self._param)
        result: Schema = whole if isinstance(whole, dict) else {}
        defined: Schema = {}
        while self._waiting:
            each = self._waiting.pop()
            defined[self._names[id(each.schema)].rpartition("/")[2]] = self._schema(each.schema, each.path)
        return {**result, "$defs": defined} if defined else result

    def _schema(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        result: Schema = {}
        for keyword in schema:
            if keyword in self._keywords:
                _add(result, self._keywords[keyword](schema, keyword, path))
            elif keyword == "additionalProperties":
                result[keyword] = self._schema(schema[keyword], f"{path}.{keyword}")
            elif keyword in {"type", "required"}:
                result[keyword] = schema[keyword]
            elif keyword in _UNENFORCED:
                if not _is_without_effect(schema, keyword):
                    self._refuse(f"The schema keyword '{keyword}' at '{path}' is not supported.")
            elif keyword not in ANNOTATIONS and self._strict and not _is_extension(keyword):
                raise UnsupportedParameterError(
                    f"The schema keyword '{keyword}' at '{path}' is not supported.", param=self._param
                )
        return result | self._bounds(schema, path)

    def _refuse(self, message: str) -> Schema:
        """Leave a keyword out of a lenient schema; raise otherwise."""
        if not self._lenient:
            raise UnsupportedParameterError(message, param=self._param)
        return {}

    def _nothing(self, schema: Schema, keyword: str, path: str) -> Schema:  # noqa: ARG002
        return {}

    # Keywords with schemas inside.

    def _map(self, schema: Schema, keyword: str, path: str) -> Schema:
        inner = schema[keyword]
        if not isinstance(inner, dict):
            return {keyword: inner}
        return {
            keyword: {name: self._schema(each, member_path(f"{path}.{keyword}", name)) for name, each in inner.items()}
        }

    def _list(self, schema: Schema, keyword: str, path: str) -> Schema:
        inner = schema[keyword]
        if not isinstance(inner, list):
            return {keyword: inner}
        return {keyword: [self._schema(each, f"{path}.{keyword}[{at}]") for at, each in enumerate(inner)]}

    def _items(self, schema: Schema, keyword: str, path: str) -> Schema:  # noqa: ARG002
        """Write `items`; a list of schemas is the `prefixItems` of older drafts."""
        inner = schema["items"]
        if not isinstance(inner, list):
            return {"items": self._schema(inner, f"{path}.items")}
        first = [self._schema(each, f"{path}.items[{at}]") for at, each in enumerate(inner)]
        if "additionalItems" not in schema:
            return {"prefixItems": first}
        return {"prefixItems": first, "items": self._schema(schema["additionalItems"], f"{path}.additionalItems")}

    def _patterns(self, schema: Schema, keyword: str, path: str) -> Schema:  # noqa: ARG002
        inner = schema["patternProperties"]
        if not isinstance(inner, dict):
            return {"patternProperties": inner}
        result: Schema = {}
        for pattern, each in inner.items():
            below = member_path(f"{path}.patternProperties", pattern)
            if (rust := self._translated(pattern, below)) is not None:
                result[rust] = self._schema(each, below)
        return {"patternProperties": result} if result else {}

    def _reference(self, schema: Schema, keyword: str, path: str) -> Schema:  # noqa: ARG002
        text = schema["$ref"]
        found = self._references.resolve(text) if isinstance(text, str) else None
        if found is None:
            where = "" if isinstance(text, str) and text.startswith("#") else ": references must be local"
            return self._refuse(f"The '$ref' at '{path}' leads nowhere{where}.")
        if not isinstance(found.schema, dict):
            return {} if found.schema else {"enum": []}
        if id(found.schema) not in self._names:
            self._names[id(found.schema)] = f"#/$defs/{len(self._names)}"
            self._waiting.append(found)
        return {"$ref": self._names[id(found.schema)]}

    # Keywords of strings and numbers.

    def _pattern(self, schema: Schema, keyword: str, path: str) -> Schema:  # noqa: ARG002
        rust = self._translated(schema["pattern"], path)
        return {} if rust is None else {"pattern": rust}

    def _translated(self, pattern: object, path: str) -> str | None:
        if not isinstance(pattern, str):
            self._refuse(f"Invalid 'pattern' at '{path}': a string is needed.")
            return None
        if self._rust:
            return pattern
        self._pattern_room -= len(pattern)
        if self._pattern_room < 0:
            self._refuse(f"The patterns of the schema have more than {MAX_PATTERNS} characters together.")
            return None
        try:
            return translated(pattern)
        except PatternError as error:
            self._refuse(f"The 'pattern' at '{path}' cannot be enforced: it has {error}.")
            return None

    def _format(self, schema: Schema, keyword: str, path: str) -> Schema:  # noqa: ARG002
        name = schema["format"]
        if not isinstance(name, str) or not _may_be(schema, "string"):
            return {}
        if name in _FORMAT_PATTERNS:
            pattern = {"pattern": _FORMAT_PATTERNS[name]}
            return {"allOf": [pattern]} if "pattern" in schema else pattern
        if name in _FORMATS:
            return {"format": name}
        if name in _OTHER_FORMATS or (self._strict and not _is_extension(name)):
            return self._refuse(f"The 'format' '{name[:64]}' at '{path}' is not supported.")
        return {}

    def _count(self, schema: Schema, keyword: str, path: str) -> Schema:
        value = schema[keyword]
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or exact_number(value) % 1:
            return self._refuse(f"Invalid '{keyword}' at '{path}': a whole number of at least 0 is needed.")
        if value < _MOST_COUNT:
            return {keyword: int(value)}
        if keyword.startswith("max"):
            return {}
        return self._refuse(f"The '{keyword}' at '{path}' is too large.")

    def _bounds(self, schema: Schema, path: str) -> Schema:
        if bounds.KEYWORDS.isdisjoint(schema):
            return {}
        try:
            return dict(bounds.rewritten_bounds(schema))
        except bounds.BoundsError as error:
            return self._refuse(f"The bounds at '{path}' {error}.")
        except ValueError as error:
            return self._refuse(f"Invalid bounds at '{path}': {error}.")

    def _multiple(self, schema: Schema, keyword: str, path: str) -> Schema:  # noqa: ARG002
        value = schema["multipleOf"]
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            return self._refuse(f"Invalid 'multipleOf' at '{path}': a number above 0 is needed.")
        if isinstance(value, JsonNumber):
            return self._refuse(f"The 'multipleOf' at '{path}' has too many digits.")
        return {"multipleOf": value}

    def _constants(self, schema: Schema, keyword: str, path: str) -> Schema:
        """Keep the constants that llguidance writes exactly."""
        value = schema[keyword]
        values = value if keyword == "enum" else [value]
        if not isinstance(values, list):
            return {keyword: value}
        kept = [each for each in values if all(map(_is_exact, _numbers(each)))]
        if values and not kept:
            return self._refuse(f"The '{keyword}' at '{path}' cannot be enforced: its numbers have too many digits.")
        return {keyword: kept if keyword == "enum" else kept[0]}


def _add(result: Schema, more: Schema) -> None:
    """Add keywords to a schema. A format beside a pattern is a schema of `allOf`."""
    every = [*result.get("allOf", []), *more.get("allOf", [])] if isinstance(more.get("allOf"), list) else None
    result |= more
    if every is not None:
        result["allOf"] = every


def _is_extension(word: str) -> bool:
    return word.startswith("x-") and word != "x-guidance"


def _may_be(schema: Schema, kind: str) -> bool:
    kinds = schema.get("type", kind)
    return kind in kinds if isinstance(kinds, list) else kinds == kind


def _is_without_effect(schema: Schema, keyword: str) -> bool:
    """Return whether a keyword allows every instance that the others allow."""
    value = schema[keyword]
    match keyword:
        case "if":
            return all(schema.get(each, True) in _EMPTY for each in ("then", "else"))
        case "then" | "else":
            return "if" not in schema or value in _EMPTY
        case "minContains" | "maxContains":
            return "contains" not in schema
        case "uniqueItems":
            most = schema.get("maxItems")
            return value is False or not _may_be(schema, "array") or (most in (0, 1) and most is not False)
        case "not":
            return value is False
        case "contains" | "unevaluatedItems":
            return not _may_be(schema, "array") or (keyword == "unevaluatedItems" and value in _EMPTY)
        case "$dynamicRef" | "$recursiveRef":
            return False
    return not _may_be(schema, "object") or value in _EMPTY


def _numbers(value: object) -> Iterator[int | float]:
    waiting = [value]
    while waiting:
        match waiting.pop():
            case dict() as members:
                waiting += members.values()
            case list() as items:
                waiting += items
            case bool():
                pass
            case int() | float() as number:
                yield number


def _is_exact(number: float) -> bool:
    """Return whether the shortest digits of the nearest double, which llguidance writes, are this number."""
    if isinstance(number, float):
        return not isinstance(number, JsonNumber)
    return -_SAFE <= number <= _SAFE or exact_number(number) == exact_number(float(number))
