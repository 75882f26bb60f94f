"""Conversion of JSON schemas for xgrammar, whose converter ignores what it cannot enforce. That is refused here.

Keywords that xgrammar reads too widely are rewritten first. Those it reads too narrowly stay so: object keys in the
order of the schema, constants without white space.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from xgrammar import Grammar as Rules

from tercet.scheduler.grammar.port import GrammarError
from tercet.scheduler.grammar.xgrammar_regex import as_rule, rewritten, searching

Schema = dict[str, Any]

_ANNOTATIONS = frozenset(
    {"$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding", "discriminator"}
    | {"externalDocs", "xml"}
)
_OF_TYPE = {
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "minItems", "maxItems"},
    "string": {"pattern", "format", "minLength", "maxLength"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
_TYPES = ["null", "boolean", "string", "number", "object", "array"]
_IN_TYPES = frozenset[str]().union(*_OF_TYPE.values())
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords of which xgrammar reads only the first, and ignores all beside it."""
_MAPS = ("$defs", "definitions", "properties", "patternProperties")
_LARGEST = 2**63
_LARGEST_FACTOR = 1000

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LEAP_DAY = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
_DAY = r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))"
_DATE = rf"(?:\d{{4}}-{_DAY}|{_LEAP_DAY})"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_FORMATS = {"ipv4": rf"^(?:{_BYTE}\.){{3}}{_BYTE}$", "date": f"^{_DATE}$", "time": f"^{_TIME}$"}
_FORMATS["date-time"] = f"^{_DATE}T{_TIME}$"
"""Stricter than xgrammar's own, which allow leading zeros in addresses, day 31 in all months and second 60."""

_MARK = 2
_SPACE = re.compile(r"^(whitespace(?:_\d+)?) ::= \(\(\[ \\n\\r\\t\]\)\)$", re.MULTILINE)
_TO_RIGHT = re.compile(
    r'Regex\("(?P<pattern>\d+)", json_string=true\)|'
    rf'"(?:[^"\\\n]|\\.)*"|\[(?:[^]\\\n]|\\.)*\]|(?<![\w.-])(?P<name>whitespace(?:_\d+)?)\{{0, {_MARK}\}}'
)


def schema_rules(schema: object) -> Rules:
    """Return the rules of a schema. Raises GrammarError naming the keyword at fault."""
    guidance = schema.get("x-guidance", {}) if isinstance(schema, dict) else {}
    unknown = set(guidance) - {"whitespace_pattern", "whitespace_flexible", "lenient"}
    if unknown:
        raise GrammarError(f"xgrammar is given no {min(unknown)!r} of 'x-guidance'")
    lenient = bool(guidance.get("lenient"))
    reader = _Schema(schema, lenient=lenient)
    written = reader.written(schema)
    space = guidance.get("whitespace_pattern", r"[ \n\r\t]*") if guidance.get("whitespace_flexible", True) else ""
    return _rules(json.dumps(written, ensure_ascii=False), space, reader.patterns)


def _rules(schema: str, space: str, patterns: list[str]) -> Rules:
    """Return xgrammar's rules of a schema, with white space and patterns corrected.

    xgrammar would count characters of white space, and its automaton of `a(?:bc*)?` accepts "ac": patterns become EBNF.
    """
    rules = Rules.from_json_schema(schema, any_whitespace=True, max_whitespace_cnt=_MARK, strict_mode=False)
    text = str(rules)
    names = set(_SPACE.findall(text))
    body = f"({as_rule(rewritten(space))})?" if space else '""'
    text = _SPACE.sub(lambda found: f"{found[1]} ::= {body}", text)

    def right(found: re.Match[str]) -> str:
        if found["pattern"]:
            return f"({as_rule(patterns[int(found['pattern'])])})"
        return found["name"] if found["name"] in names else found[0]

    return Rules.from_ebnf(_TO_RIGHT.sub(right, text))


class _Schema:
    """A schema and its subschemas. A lenient one is enforced as far as possible."""

    def __init__(self, root: object, *, lenient: bool) -> None:
        self._root = root
        self._lenient = lenient
        self.patterns: list[str] = []
        """Converted patterns. The schema for xgrammar has their indices in the place of patterns."""

    def written(self, schema: object) -> object:
        """Return a new schema that xgrammar reads with the meaning of this one. Data such as `const` is shared."""
        if not isinstance(schema, dict):
            return schema
        read = {name: value for name, value in schema.items() if name not in _ANNOTATIONS and not name.startswith("x-")}
        self._check_alone(read)
        self._check_known(read)
        for name in _MAPS:
            if isinstance(inner := read.get(name), dict):
                read[name] = {key: self.written(each) for key, each in inner.items()}
        for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(inner := read.get(name), list):
                read[name] = [self.written(each) for each in inner]
        for name in ("items", "additionalProperties"):
            if name in read:
                read[name] = self.written(read[name])
        return self._typed(read)

    def _check_alone(self, read: Schema) -> None:
        """Refuse a keyword that must stand alone but does not."""
        first = next((each for each in _ALONE if each in read), "")
        if first in {"enum", "const"}:
            self._choose(read, first)
        if first and (beside := (set(read) & {*_ALONE, *_IN_TYPES, "type"}) - {first}):
            self._refuse(f"{min(beside)!r} beside {first!r}")
        if first == "allOf" and len(read["allOf"]) != 1:
            self._refuse("'allOf' of several schemas")
            read["allOf"] = read["allOf"][:1]
        if first == "oneOf":
            if not self._are_apart(read["oneOf"]):
                self._refuse("'oneOf' of schemas that may have an instance in common")
            read["anyOf"] = read.pop("oneOf")

    def _choose(self, read: Schema, keyword: str) -> None:
        """Keep the constants of the type beside them."""
        values = read["enum"] if keyword == "enum" else [read["const"]]
        kept = [each for each in values if _is(each, read.get("type"))]
        if not kept or any(map(_is_huge, kept)):
            self._refuse(f"the {keyword!r} of these values")
        read.pop("type", None)
        read[keyword] = (kept or values) if keyword == "enum" else values[0]

    def _check_known(self, read: Schema) -> None:
        for name in set(read) - {*_ALONE, *_IN_TYPES, "type", "$defs", "definitions"}:
            self._refuse(f"{name!r}")
            del read[name]
        if isinstance(read.get("items"), list):
            self._refuse("a list of 'items'")

    def _typed(self, read: Schema) -> Schema:
        """Add the type if other keywords need one, and convert these keywords."""
        if "type" not in read and _IN_TYPES & set(read):
            read["type"] = _TYPES
        self._write_string(read)
        self._check_number(read)
        self._write_object(read)
        return read

    def _write_string(self, read: Schema) -> None:
        told = {"pattern", "format"} & set(read)
        least, most = read.pop("minLength", None), read.pop("maxLength", None)
        bounded = least is not None or most is not None
        if len(told) + bounded > 1:
            self._refuse("more than one of 'pattern', 'format' and bounds of length")
        if "pattern" in read:
            try:
                read["pattern"] = self._noted(read["pattern"])
            except GrammarError as error:
                self._refuse(f"a 'pattern': {error}")
                del read["pattern"]
        elif read.get("format") in _FORMATS:
            read["pattern"] = self._noted(_FORMATS[read.pop("format")])
        elif bounded and not told:  # xgrammar's own lets control characters through
            read["pattern"] = self._noted(rf"^(?s:.){{{int(least or 0)},{'' if most is None else int(most)}}}$")

    def _noted(self, pattern: str) -> str:
        self.patterns.append(searching(pattern))
        return str(len(self.patterns) - 1)

    def _check_number(self, read: Schema) -> None:
        if "multipleOf" not in read:
            return
        whole = isinstance(read["multipleOf"], int) and read.get("type") == "integer"
        if not whole or set(read) & (_OF_TYPE["number"] - {"multipleOf"}) or read["multipleOf"] > _LARGEST_FACTOR:
            self._refuse(f"'multipleOf' but of a whole number up to {_LARGEST_FACTOR} without bounds")
            del read["multipleOf"]

    def _write_object(self, read: Schema) -> None:
        properties, others = read.get("properties", {}), read.get("additionalProperties", True)
        missing = [name for name in read.get("required", []) if name not in properties]
        if "patternProperties" in read:
            patterns = read["patternProperties"]
            if missing or properties or len(patterns) != 1 or others is not False:
                self._refuse("'patternProperties' but one pattern alone, with 'additionalProperties' false")
            read["patternProperties"] = {self._noted(name): each for name, each in patterns.items()}
        elif missing:
            if others is False:
                self._refuse("a property that is 'required' and not allowed")
            read["properties"] = {**properties, **dict.fromkeys(missing, others)}
        if read.get("minProperties", 0) > 1 and others is not False:
            self._refuse("'minProperties' above 1 of any names")

    def _are_apart(self, schemas: list[object]) -> bool:
        """Return whether no two of the schemas can have an instance in common, as far as can be proved."""
        kinds = [self._told(each) for each in schemas]
        return all(_are_apart(a, b) for place, a in enumerate(kinds) for b in kinds[:place])

    def _told(self, schema: object) -> Mapping[str, Any]:
        """Return a schema, or the one it refers to."""
        for _ in range(len(_ALONE)):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            found: Any = self._root
            for part in str(schema["$ref"]).removeprefix("#").strip("/").split("/"):
                found = found.get(part) if isinstance(found, dict) else None
            schema = found
        return schema if isinstance(schema, dict) else {}

    def _refuse(self, what: str) -> None:
        if not self._lenient:
            raise GrammarError(f"xgrammar cannot enforce {what} in a JSON schema")


def _are_apart(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Return whether types, constants, or the constants of a required property exclude each other."""
    values, others = _constants(a), _constants(b)
    if values and others:
        return not any(value == other for value in values for other in others)
    kinds = [each.get("type") for each in (a, b)]
    if isinstance(kinds[0], str) and isinstance(kinds[1], str) and kinds[0] != kinds[1]:
        return set(kinds) != {"integer", "number"}
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    inner = [(a.get("properties", {}).get(name, {}), b.get("properties", {}).get(name, {})) for name in shared]
    return kinds == ["object", "object"] and any(
        _constants(one) and _constants(other) and _are_apart(one, other) for one, other in inner
    )


def _constants(schema: object) -> list[object]:
    if not isinstance(schema, dict):
        return []
    return [schema["const"]] if "const" in schema else list(schema.get("enum", ()))


def _is(value: object, kinds: object) -> bool:
    """Return whether a value has one of the types; True if no type is given."""
    names = kinds if isinstance(kinds, list) else [kinds]
    match value:
        case None:
            found = {"null"}
        case bool():
            found = {"boolean"}
        case int():
            found = {"integer", "number"}
        case float():
            found = {"number"}
        case str():
            found = {"string"}
        case list():
            found = {"array"}
        case _:
            found = {"object"}
    return kinds is None or bool(found & set(names))


def _is_huge(value: object) -> bool:
    """Return whether a number in the value exceeds 64 bits: xgrammar would round it."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return any(map(_is_huge, value))
    return isinstance(value, int) and not -_LARGEST <= value < _LARGEST
