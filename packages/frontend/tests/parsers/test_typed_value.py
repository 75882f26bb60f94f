"""Bare text becomes JSON of a type its schema allows."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tercet.frontend.parsers.reader import MAX_HELD_CHARS
from tercet.frontend.parsers.typed_value import LITERAL, STRING, UNKNOWN, ValueWriter, json_types, to_json


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"enum": ["a", 1, 1.5, True, None]}, {"string", "integer", "number", "boolean", "null"}),
        ({"const": {"a": 1}}, {"object"}),
        ({"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/list"}]}, {"integer", "array"}),
        ({"oneOf": [{"type": "integer"}, {}]}, set()),
        ({"allOf": [{"minimum": 1}, {"type": "number"}]}, {"number"}),
        ({"$ref": "#/$defs/round"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        (True, set()),
        (None, set()),
    ],
)
def test_kinds_of_a_schema(schema: object, expected: set[str]) -> None:
    root = {"$defs": {"list": {"type": "array"}, "round": {"$ref": "#/$defs/round"}}}
    assert json_types(schema, root) == expected


class Watched(dict[str, Any]):
    """Schema that counts the accesses to any instance."""

    looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        Watched.looks += 1
        return super().get(key, default)


@pytest.fixture
def watched() -> Iterator[type[Watched]]:
    Watched.looks = 0
    yield Watched
    assert Watched.looks < 10_000


ITSELF = {"$ref": "#/properties/x"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"anyOf": [ITSELF] * 24}, set()),
        ({"anyOf": [{"type": "integer"}, *[ITSELF] * 24]}, set()),
        ({"allOf": [ITSELF] * 24}, set()),
        ({"allOf": [*[ITSELF] * 24, {"type": "integer"}]}, {"integer"}),
        ({"oneOf": [{"$ref": "#/properties/y"}] * 24}, {"string"}),
        ({"anyOf": [{"type": "integer"}] * 20_000}, set()),
        ({"allOf": [{"minimum": 1}] * 20_000}, set()),
        ({"enum": [1] * 20_000}, {"integer"}),
    ],
)
def test_schemas_without_end_are_looked_at_for_a_while(
    watched: type[Watched], schema: dict[str, Any], expected: set[str]
) -> None:
    shared = {"x": schema, "y": {"anyOf": [{"type": "string"}] * 24}}
    root = json.loads(json.dumps({"properties": shared}), object_hook=watched)
    assert json_types(root["properties"]["x"], root) == expected


def test_a_reference_is_looked_into_once_for_all_schemas_of_a_root(watched: type[Watched]) -> None:
    branches = [{"type": "string"}] * 500
    root = json.loads(json.dumps({"$defs": {"long": {"anyOf": branches}}}), object_hook=watched)
    known: dict[str, frozenset[str]] = {}
    for _ in range(500):
        assert json_types({"$ref": "#/$defs/long"}, root, known) == STRING


@pytest.mark.parametrize(
    ("text", "allowed", "expected"),
    [
        ("5", {"string", "integer"}, 5),
        ("5", {"string"}, "5"),
        ("5", {"number"}, 5),
        ("5.5", {"integer"}, "5.5"),
        (" 5 ", {"integer"}, 5),
        ("True", {"boolean"}, True),
        ("true", {"string", "null"}, "true"),
        ("null", {"string", "null"}, None),
        ("None", {"integer"}, None),
        ("null", {"string"}, "null"),
        ("{'a': None}", {"object"}, {"a": None}),
        ('{"a": 1}', {"array"}, '{"a": 1}'),
        ('"quoted"', {"string", "integer"}, '"quoted"'),
        ("NaN", {"number"}, "NaN"),
        ("[" * 100_000, {"array"}, "[" * 100_000),
        ("5.0", {"integer"}, 5.0),
        ("1e999", {"number"}, float("inf")),
        ("[1, 2]", set(), [1, 2]),
        ("plain words", set(), "plain words"),
        ('"quoted"', set(), '"quoted"'),
    ],
)
def test_text_by_what_is_allowed(text: str, allowed: set[str], expected: object) -> None:
    assert json.loads(to_json(text, frozenset(allowed))) == expected


@pytest.mark.parametrize("text", ["9" * 5000, "1e999", "0.1000", "-0.0", "123456789012345678901234567890.5", "1E+5"])
@pytest.mark.parametrize("allowed", [{"number"}, {"string", "number"}, set(), LITERAL])
def test_numbers_stay_as_they_are_written(text: str, allowed: set[str]) -> None:
    assert to_json(text, frozenset(allowed)) == text
    assert to_json(text, STRING) == f'"{text}"'


def test_a_value_marked_as_json_may_be_a_string() -> None:
    assert to_json('"5"', LITERAL) == '"5"'
    assert to_json("five", LITERAL) == '"five"'


def test_a_string_is_written_as_it_arrives() -> None:
    out: list[str] = []
    writer = ValueWriter(out.append, STRING)
    writer.add('a"')
    assert "".join(out) == '"a\\"'
    writer.add("\nb")
    writer.close()
    assert json.loads("".join(out)) == 'a"\nb'


@pytest.mark.parametrize("step", [1_000, MAX_HELD_CHARS * 2])
def test_a_value_too_long_to_hold_is_a_string(step: int) -> None:
    text = "1" * (MAX_HELD_CHARS + 1)
    out: list[str] = []
    writer = ValueWriter(out.append, UNKNOWN)
    for at in range(0, len(text), step):
        writer.add(text[at : at + step])
    assert out
    writer.close()
    assert json.loads("".join(out)) == text
