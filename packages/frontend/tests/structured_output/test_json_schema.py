"""Schemas with unenforceable keywords are refused by name."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.frontend.errors import BadRequestError, UnsupportedParameterError
from tercet.frontend.structured_output.json_schema import check_schema, schema_text

STRICT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "$defs": {"c": {"type": "object", "properties": {}, "required": [], "additionalProperties": False}},
}
UNSUPPORTED = [
    "not if then else uniqueItems contains minContains maxContains propertyNames dependentRequired dependentSchemas "
    "dependencies unevaluatedProperties unevaluatedItems $dynamicRef $recursiveRef"
]

EFFECTIVE: dict[str, Any] = {"uniqueItems": True, "if": {"type": "string"}, "minContains": 2, "maxContains": 2}
EFFECTIVE |= {"not": {}, "contains": {}, "unevaluatedProperties": False, "unevaluatedItems": False, "then": False}
EFFECTIVE |= {"else": False}
BESIDE: dict[str, Any] = {"if": {"then": False}, "then": {"if": {}}, "else": {"if": {}}}
BESIDE |= {"minContains": {"contains": {}}, "maxContains": {"contains": {}}}


def written(schema: Any, *, strict: bool = False) -> str:
    check_schema(schema, "schema", strict=strict)
    return schema_text(schema, "schema", strict=strict)


def refusal(schema: Any, *, strict: bool = False) -> BadRequestError:
    with pytest.raises(BadRequestError) as error:
        written(schema, strict=strict)
    assert error.value.param == "schema"
    return error.value


@pytest.mark.parametrize("keyword", UNSUPPORTED[0].split())
@pytest.mark.parametrize(
    ("place", "path"),
    [
        (lambda inner: inner, "schema"),
        (lambda inner: {"properties": {"not": inner}}, "schema.properties.not"),
        (lambda inner: {"patternProperties": {"^a": inner}}, "schema.patternProperties.^a"),
        (lambda inner: {"$defs": {"b c": inner}, "$ref": "#/$defs/b%20c"}, "schema.$defs.b c"),
        (lambda inner: {"items": {"$ref": "#/x/0"}, "x": [inner]}, "schema.x[0]"),
        (lambda inner: {"anyOf": [{}, {"items": inner}]}, "schema.anyOf[1].items"),
        (lambda inner: {"items": [inner]}, "schema.items[0]"),
        (lambda inner: {"additionalProperties": inner}, "schema.additionalProperties"),
    ],
)
def test_what_cannot_be_enforced_is_named_wherever_it_stands(keyword: str, place: Any, path: str) -> None:
    error = refusal(place({keyword: EFFECTIVE.get(keyword, {"a": ["b"]}), **BESIDE.get(keyword, {})}))
    assert isinstance(error, UnsupportedParameterError)
    assert f"at '{path}'" in error.message
    assert f"'{keyword}'" in error.message or keyword in BESIDE


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        STRICT,
        {"properties": {"not": {}, "uniqueItems": True, "$ref": {}}},
        {"const": {"not": 1}, "enum": [{"if": 1}], "default": {"not": 1}, "examples": [{"not": 1}]},
        {"title": "t", "description": "d", "x-order": 3, "discriminator": {"propertyName": "kind"}, "deprecated": True},
        {"$schema": "http://json-schema.org/draft-07/schema#", "$id": "mine", "$comment": "c"},
        {"properties": {"a": {"$ref": "#"}, "b": {"items": {"$ref": "#/properties/b"}}}},
        {"$defs": {"b": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}, "c": {"$ref": "#/$defs/b"}}},
        {
            "allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}],
            "$defs": {"b": {"$ref": "#x"}, "c": {"$anchor": "x"}},
        },
        {"$ref": "mine#/$defs/c", "$id": "mine", "$defs": {"c": {"$id": "other"}, "d": {"$ref": "other"}}},
        {"nullable": True, "readonly": True, "order": 1, "x-guidance": {"lenient": True}, "format": "int64"},
        {"uniqueItems": False, "then": {}, "else": False, "maxItems": 2.0, "maxLength": 10**12, "not": False},
        {"type": "string", "uniqueItems": True, "dependencies": {"a": ["b"]}, "unevaluatedProperties": False},
        {"additionalItems": False, "unevaluatedItems": True, "if": {"const": 1}, "minContains": 2},
    ],
)
def test_names_of_properties_data_and_annotations_are_no_keywords(schema: Any) -> None:
    check_schema(schema, "schema", strict=False)
    schema_text(schema, "schema")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "https://example.com/schema"}, "must be local"),
        ({"properties": {"a": {"$ref": "other.json#/a"}}}, "schema.properties.a"),
        ({"type": "string", "format": "iri"}, "'iri'"),
        ({"$ref": "#/nowhere/0"}, "leads nowhere"),
        ({"$ref": "#/properties/a", "properties": {}}, "leads nowhere"),
        ({"items": {"pattern": r"(a)\1"}}, "'schema.items' cannot be enforced: it has a back reference"),
        ({"patternProperties": {r"\bx": {}}}, "word boundary"),
        ({"maxItems": 2.5}, "'maxItems' at 'schema'"),
        ({"minLength": -1}, "'minLength' at 'schema'"),
        ({"minItems": "2"}, "'minItems' at 'schema'"),
        ({"items": {"minimum": "2"}}, "'schema.items'"),
        ({"multipleOf": 0}, "'multipleOf' at 'schema'"),
        ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "no whole number"),
        ({"properties": {"a": 5}}, "schema.properties.a"),
        ({"anyOf": ["x"]}, "schema.anyOf[0]"),
        (False, "no answer"),
        ({"$ref": "#"}, "'schema' leads back"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, "leads back"),
        ({"$defs": {"b": {"allOf": [{"$ref": "#/$defs/c~1"}]}, "c/": {"anyOf": [{"$ref": "#/%24defs/b"}]}}}, "back"),
        ({"items": [{"$ref": "#/items/0"}]}, "'schema.items[0]' leads back"),
    ],
)
def test_other_faults_are_reported_with_their_place(schema: Any, words: str) -> None:
    assert words in refusal(schema).message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"additionalProperties": True}, "'additionalProperties' must be false at 'schema'"),
        ({"required": ["a"]}, "'b'"),
        ({"type": "array"}, "'type' 'object'"),
        ({"anyOf": [{}]}, "'anyOf'"),
        ({"properties": {"a": {"type": ["object", "null"]}, "b": {}}}, "schema.properties.a"),
        ({"$defs": {"c": {"properties": {}}}}, "schema.$defs.c"),
        ({"nullable": True}, "'nullable' at 'schema'"),
    ],
)
def test_strict_schemas_keep_to_openais_rules(change: dict[str, Any], words: str) -> None:
    check_schema(STRICT, "schema", strict=True)
    assert words in refusal({**STRICT, **change}, strict=True).message
    check_schema({key: value for key, value in {**STRICT, **change}.items() if key != "$defs"}, "schema", strict=False)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_depth_and_size_are_bounded() -> None:
    check_schema(nested(63), "schema", strict=False)
    assert "deeper" in refusal(nested(64)).message
    assert "deeper" in refusal(nested(100_000)).message
    check_schema({"enum": list(range(19_000))}, "schema", strict=False)
    assert "values" in refusal({"enum": list(range(20_001))}).message
    patterns = {f"p{number}": {"pattern": "[a-z]" * 100} for number in range(33)}
    assert "16384 characters" in refusal({"properties": patterns}).message


def test_paths_in_errors_have_the_beginning_of_a_long_name() -> None:
    long: dict[str, Any] = {"properties": {"x" * 1_000_000: {"items": {"not": {}}}}}
    short: dict[str, Any] = {"properties": {"x" * 64: {"items": {"not": {}}}}}
    assert refusal(long).message == refusal(short).message
    assert refusal({"patternProperties": {"x" * 99: 5}}).message.startswith(
        f"Invalid schema at 'schema.patternProperties.{'x' * 64}'"
    )


def test_the_schemas_own_order_of_properties_stays() -> None:
    text = schema_text({"properties": {"z": {}, "a": {}}}, "schema")
    assert text.index('"z"') < text.index('"a"')


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "properties", "items", "anyOf", "$ref", "required", "enum", "format", "$defs", "x"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@settings(max_examples=200, deadline=None)
@given(
    tree=st.dictionaries(st.sampled_from(["type", "properties", "anyOf", "required", "items"]), trees),
    strict=st.booleans(),
)
def test_any_tree_is_taken_or_refused(tree: dict[str, Any], strict: bool) -> None:
    try:
        assert written(tree, strict=strict)
    except BadRequestError:
        return
