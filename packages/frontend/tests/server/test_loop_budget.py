"""Every size that a client chooses is bounded before work on it begins; see docs/design/event-loop-budget.md.

No test measures time: a bounded number costs a bounded time.
"""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import tercet.frontend
from tercet.frontend.api.openai.chat_schema import chat_request
from tercet.frontend.api.sglang.generate_schema import tokenize_request
from tercet.frontend.http.request_body import MAX_ITEMS, MAX_VALUES

_SOURCES = Path(next(iter(tercet.frontend.__path__)))
_LONGEST_TEXT = 16_777_216
"""Characters. Rendering and tokenizing run outside the loop and have their own bounds."""
_REPEATS = re.compile(r"\{\d+,(\d+)\}\$$")
"""A pattern of one character class with a maximum repetition."""
_TOKENS = 4_194_304


def schemas() -> dict[str, type[BaseModel]]:
    """Return all schemas of request bodies."""
    found: dict[str, type[BaseModel]] = {
        "chat": chat_request("reasoning_content"),
        "tokenize": tokenize_request("reasoning_content"),
    }
    for path in _SOURCES.rglob("*.py"):
        text = path.read_text()
        for call in ast.walk(ast.parse(text)) if "read_model(" in text else ():
            match call:
                case ast.Call(ast.Name("read_model"), [_, ast.Name(schema), *_]):
                    name = ".".join(("tercet.frontend", *path.relative_to(_SOURCES).with_suffix("").parts))
                    found[schema] = getattr(importlib.import_module(name), schema)
    return found


SCHEMAS = schemas()


def bounds(node: dict[str, Any], path: str, root: dict[str, Any], seen: set[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, kind, bound) for every size in a JSON schema; the bound is None if there is none."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in seen:
            seen.add(name)
            yield from bounds(root["$defs"][name], name, root, seen)
    match node.get("type"):
        case "array" if "prefixItems" not in node:
            yield path, "array", node.get("maxItems")
        case "string" if not {"enum", "const"} & node.keys():
            repeats = _REPEATS.search(node.get("pattern", ""))
            yield path, "string", node.get("maxLength", int(repeats[1]) if repeats else None)
    for kind in ("anyOf", "oneOf", "allOf"):
        for inner in node.get(kind, ()):
            yield from bounds(inner, path, root, seen)
    for name, inner in node.get("properties", {}).items():
        yield from bounds(inner, f"{path}.{name}", root, seen)
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield from bounds(node[name], f"{path}[]", root, seen)


def test_every_endpoint_with_a_body_is_here() -> None:
    assert len(SCHEMAS) >= 20
    assert {"CompletionRequest", "CreateResponse", "CreateMessage", "EmbeddingCreate", "AbortRequest"} <= SCHEMAS.keys()


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_every_list_and_text_of_a_body_has_a_bound(name: str) -> None:
    schema = SCHEMAS[name].model_json_schema()
    found = list(bounds(schema, name, schema, set()))
    unbounded = {place for place, _, bound in found if bound is None}
    assert unbounded <= {"UpdateWeightsFromTensor.serialized_named_tensors[]"}, "files of admins, decoded in a thread"
    found = [each for each in found if each[0] not in unbounded]
    most = {"array": _TOKENS, "string": _LONGEST_TEXT}
    assert [place for place, kind, bound in found if bound > most[kind]] == []


def test_values_of_a_body_cost_less_than_a_second() -> None:
    """Parsing and validation each cost less than half a microsecond for a value."""
    assert MAX_VALUES <= 2**16
    assert MAX_ITEMS <= 2**19
