"""`param` names what the client wrote, at every place of every request schema.

The test walks the schemas and makes one fault at a time: an unknown key in every object, also under the tags of every
union, and a wrong type at every leaf.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel, ValidationError

from tercet.frontend.api.docs.operations import OPERATIONS
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.parameter_path import Step, joined
from tercet.frontend.http.request_body import validation_error

JSON = (each.body for each in OPERATIONS.values() if each.body and not each.form)
BODIES = sorted({*JSON}, key=lambda body: body.__name__)
LEAVES = {"str": "a", "bool": False, "any": {}, "dict": {}, "none": None, "int": 1, "float": 0.5}


class Fault(NamedTuple):
    """A JSON value with one fault, and the keys that lead to it."""

    value: Any
    keys: tuple[Step, ...]


class Walk:
    """Walk through the core schema of a model."""

    def __init__(self, model: type[BaseModel]) -> None:
        whole: Any = model.__pydantic_core_schema__
        self.definitions = {each["ref"]: each for each in whole.get("definitions", ())}
        self.root = whole["schema"] if whole["type"] == "definitions" else whole
        self.tags: set[str] = set()
        self._collect_tags(whole)

    def _collect_tags(self, node: Any) -> None:
        if isinstance(node, dict):
            if node.get("type") == "tagged-union":
                self.tags |= set(node["choices"])
            for name, each in node.items():
                if name not in {"metadata", "serialization", "cls"}:
                    self._collect_tags(each)
        elif isinstance(node, list | tuple):
            for each in node:
                self._collect_tags(each)

    def inner(self, schema: Any) -> Any:
        """Return a schema without wrappers."""
        while True:
            if schema["type"] == "definition-ref":
                schema = self.definitions[schema["schema_ref"]]
            elif "schema" in schema and schema["type"] != "model-fields":
                schema = schema["schema"]
            else:
                return schema

    def branches(self, union: Any) -> Iterator[tuple[Any, dict[str, str]]]:
        """Yield the branches of a union, and the members that choose each."""
        if union["type"] == "tagged-union":
            key = union["discriminator"] if isinstance(union["discriminator"], str) else "type"
            for tag, branch in union["choices"].items():
                yield branch, {key: tag} if self.has_objects(branch) else {}
        else:
            yield from ((each[0] if isinstance(each, tuple) else each, {}) for each in union["choices"])

    def least(self, schema: Any) -> Any:
        """Return a small value without a fault, apart from those that `after` validators find."""
        schema = self.inner(schema)
        match schema["type"]:
            case "model-fields":
                return {
                    _alias(name, field): self.least(field["schema"])
                    for name, field in schema["fields"].items()
                    if self.required(field["schema"])
                }
            case "list":
                return [self.least(schema["items_schema"])]
            case "literal":
                return schema["expected"][0]
            case "union" | "tagged-union":
                branch, members = next(self.branches(schema))
                return {**self.least(branch), **members} if members else self.least(branch)
            case "int":
                return schema.get("ge", 1)
        return LEAVES[schema["type"]]

    def required(self, schema: Any) -> bool:
        while schema["type"].startswith("function-"):
            schema = schema["schema"]
        return bool(schema["type"] != "default")

    def faults(self, schema: Any) -> Iterator[Fault]:
        schema = self.inner(schema)
        match schema["type"]:
            case "model-fields":
                yield from self.faults_of_object(schema)
            case "list":
                good = self.least(schema["items_schema"])
                for value, keys in self.faults(schema["items_schema"]):
                    yield Fault([good, value], (1, *keys))
            case "union" | "tagged-union":
                for branch, members in self.branches(schema):
                    # A wrong value that is no object fits no branch: the place within it depends on the branch.
                    if self.inner(branch)["type"] not in LEAVES and self.has_objects(branch):
                        for value, keys in self.faults(branch):
                            yield Fault({**value, **members} if members else value, keys)
            case "any" | "dict":
                pass
            case kind:
                yield Fault(5 if kind in {"str", "literal", "bool"} else "a", ())

    def has_objects(self, schema: Any) -> bool:
        """Return whether values are objects with known keys, or lists of them."""
        schema = self.inner(schema)
        match schema["type"]:
            case "list":
                return self.has_objects(schema["items_schema"])
            case "union":
                return any(self.has_objects(branch) for branch, _ in self.branches(schema))
        return schema["type"] in {"model-fields", "tagged-union"}

    def faults_of_object(self, schema: Any) -> Iterator[Fault]:
        good = self.least(schema)
        known = {_alias(name, field): field["schema"] for name, field in schema["fields"].items()}
        for unknown in {"zz", *self.tags} - known.keys():
            yield Fault({**good, unknown: 1}, (unknown,))
        for name, field in known.items():
            for value, keys in self.faults(field):
                if name not in {"type", "role"}:  # another value is another branch
                    yield Fault({**good, name: value}, (name, *keys))


def _alias(name: str, field: Any) -> str:
    alias = field.get("validation_alias", name)
    return alias if isinstance(alias, str) else alias[0][0]


@pytest.mark.parametrize("model", BODIES, ids=lambda model: model.__name__)
def test_every_fault_is_reported_where_it_is(model: type[BaseModel]) -> None:
    walk = Walk(model)
    wrong = {}
    for value, keys in walk.faults(walk.root):
        expected = joined(keys) or ""
        try:
            model.model_validate(value)
        except ValidationError as error:
            param = validation_error(error, value, model).param
        except BadRequestError as error:  # of a tool or item of an unsupported type
            param = expected if expected.startswith(error.param or "?") else error.param
        if param != expected:
            wrong[expected] = param
    assert not wrong


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
FUNCTION = {"type": "function", "name": "f"}
ITEMS = {"model": "m", "input": "a"}
CLAUDE = {**CHAT, "max_tokens": 5}
SAID = {"role": "assistant", "content": [{"type": "text", "text": "a"}]}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_schema", "strict": True, "json_schema": {"name": "a"}}},
            "response_format.strict",
        ),
        ("/v1/chat/completions", {**CHAT, "tools": [{**TOOL, "strict": True}]}, "tools[0].strict"),
        ("/v1/chat/completions", {**CHAT, "tools": [{**FUNCTION, "parameters": {}}]}, "tools[0].function"),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [*CHAT["messages"], {**SAID, "content": [{"type": "text", "text": "a", "x": 1}]}]},
            "messages[1].content[0].x",
        ),
        (
            "/v1/chat/completions",
            {**CHAT, "messages": [*CHAT["messages"], {**SAID, "audio": {"id": "a"}}]},
            "messages[1].audio",
        ),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "assistant"}]}, "messages[0].content"),
        ("/v1/chat/completions", {**CHAT, "tools": [TOOL, {"type": "mcp"}]}, "tools[1].type"),
        (
            "/v1/chat/completions",
            {**CHAT, "response_format": {"type": "json_object", "schema": {}, "value": {}}},
            "response_format.value",
        ),
        (
            "/v1/responses",
            {**ITEMS, "tools": [FUNCTION, {**FUNCTION, "defer_loading": True}]},
            "tools[1].defer_loading",
        ),
        (
            "/v1/responses",
            {**ITEMS, "tools": [{"type": "namespace", "name": "n", "tools": [{**FUNCTION, "async": True}]}]},
            "tools[0].tools[0].async",
        ),
        ("/v1/responses", {**ITEMS, "reasoning": {"mode": "deep"}}, "reasoning.mode"),
        (
            "/v1/messages",
            {**CLAUDE, "tools": [{"name": "f", "input_schema": {}, "defer_loading": True}]},
            "tools[0].defer_loading",
        ),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": 5}}, "sampling_params.json_schema"),
    ],
)
def test_a_field_of_an_object_is_named_with_its_place(route: str, body: dict[str, Any], param: str) -> None:
    model = OPERATIONS["POST", route].body
    assert model is not None
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    error = validation_error(caught.value, body, model)
    assert error.param == param
    assert "{param}" not in error.message
