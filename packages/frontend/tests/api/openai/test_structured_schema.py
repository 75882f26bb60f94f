"""Structured output, from the client's fields to the message that a scheduler gets."""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
import msgspec
import pytest

from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import Grammar, GrammarKind, ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NAMED: dict[str, Any] = {"name": "thing", "description": "d", "schema": SCHEMA, "strict": True}
TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}],
    "triggers": ["<f"],
}
TRIGGERED: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"},
            {"begin": "<f2>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</f>"},
            {"begin": "<f3>", "content": {"type": "grammar", "grammar": 'root ::= "x"'}, "end": "</f>"},
            {"begin": "<f4>", "content": {"type": "const_string", "value": "y"}, "end": "</f>"},
        ],
    },
}
BOMB = {"type": "integer", "multipleOf": 99999999}


async def complete(served: Served, http_of: HttpOf, asked: dict[str, Any]) -> httpx2.Response:
    return await http_of(served).post("/v1/completions", json={"model": "tiny", "prompt": "hello", **asked})


async def native(served: Served, http_of: HttpOf, asked: dict[str, Any]) -> httpx2.Response:
    return await http_of(served).post("/generate", json={"text": "hello", "sampling_params": asked})


async def grammars_of(
    engine: FakeEngine, http_of: HttpOf, asked: Sequence[dict[str, Any]], way: Any = complete
) -> list[Grammar | None]:
    """Return the grammars that a scheduler gets, requested one after another."""
    async with serving(engine) as served:
        for each in asked:
            answer = await way(served, http_of, each)
            assert answer.status_code == 200, answer.text
        return [request.sampling.grammar for request in served.engine.requests()]


async def test_nothing_asked_is_nothing_sent(engine_of: EngineOf, http_of: HttpOf) -> None:
    asked: list[dict[str, Any]] = [{}, {"response_format": {"type": "text"}}, {"response_format": None}]
    assert await grammars_of(engine_of(), http_of, asked) == [None] * 3


async def test_a_schema_arrives_however_it_was_spelt(engine_of: EngineOf, http_of: HttpOf) -> None:
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"response_format": {"type": "json_object", "value": SCHEMA}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
    ]
    grammars = await grammars_of(engine_of(), http_of, asked)
    [grammar] = set(grammars)
    assert len(grammars) == len(asked)
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA
    read = json.loads(grammar.text)
    assert {name: read[name] for name in SCHEMA} == SCHEMA


SPELLINGS: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, '"object"'),
    ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, '"object"'),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "any"}}}, GrammarKind.JSON_SCHEMA, "{"),
    ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
    ({"guided_regex": "a+"}, GrammarKind.REGEX, "a+"),
    ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, GrammarKind.LARK, '"yes" | "no"'),
    ({"guided_choice": ["yes", "no"]}, GrammarKind.LARK, '"yes" | "no"'),
    ({"ebnf": 'root ::= "x"'}, GrammarKind.LARK, '"x"'),
    ({"guided_grammar": 'root ::= "x"'}, GrammarKind.LARK, '"x"'),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, GrammarKind.LARK, 'start: "x"'),
    ({"response_format": TAG}, GrammarKind.LARK, "<f"),
    ({"response_format": TRIGGERED}, GrammarKind.LARK, "<f"),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, GrammarKind.LARK, "<f"),
]
NATIVE_SPELLINGS: list[tuple[dict[str, Any], GrammarKind, str]] = [
    ({"json_schema": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, '"integer"'),
    ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
    ({"ebnf": 'root ::= "x"'}, GrammarKind.LARK, '"x"'),
    ({"structural_tag": json.dumps(TAG)}, GrammarKind.LARK, "<f"),
]


@pytest.mark.parametrize(("spellings", "way"), [(SPELLINGS, complete), (NATIVE_SPELLINGS, native)])
async def test_every_spelling_arrives(
    engine_of: EngineOf, http_of: HttpOf, spellings: list[tuple[dict[str, Any], GrammarKind, str]], way: Any
) -> None:
    grammars = await grammars_of(engine_of(), http_of, [asked for asked, _, _ in spellings], way)
    for grammar, (asked, kind, part) in zip(grammars, spellings, strict=True):
        assert grammar is not None, asked
        assert grammar.kind is kind, asked
        assert part in grammar.text, asked


def strict(**change: Any) -> dict[str, Any]:
    named = {**NAMED, "schema": {**SCHEMA, **change}}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


FORMAT = "response_format.json_schema.schema"


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (strict(additionalProperties=True), FORMAT, "additionalProperties"),
    (strict(required=[]), FORMAT, "required"),
    (strict(properties={"a": {"type": "array", "uniqueItems": True}}), FORMAT, "uniqueItems"),
    (strict(properties={"a": {"type": "rhyme"}}), FORMAT, "rhyme"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
    ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "name", "pattern"),
    ({"response_format": {**TAG, "triggers": None}}, "response_format", "structural tag"),
    ({"response_format": {**TAG, "triggers": ["x"]}}, "response_format", "triggers"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "at least 1"),
    ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern", "Unknown"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag", "Invalid"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag", "JSON"),
    ({"guided_json": "{"}, "guided_json", "JSON"),
    ({"guided_json": "[]"}, "guided_json", "object"),
    ({"ebnf": "root ::= missing"}, "ebnf", "missing"),
    ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
    ({"regex": "a", "ebnf": 'root ::= "x"'}, "ebnf", "'regex'"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex", "'response_format'"),
    ({"structured_outputs": {"regex": "a", "choice": ["x"]}}, "structured_outputs.choice", "only one"),
    ({"response_format": {"type": "json_object", "schema": {}, "value": {}}}, "response_format.value", "'schema'"),
    ({"regex": "a" * 131_073}, "regex", "at most"),
]


async def test_what_cannot_be_is_refused_by_name(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        for asked, param, words in REFUSED:
            answer = await complete(served, http_of, asked)
            error = answer.json()["error"]
            assert answer.status_code == 400, error
            assert param in error["param"], error
            assert words in error["message"], error
        assert served.engine.requests() == []


async def test_a_model_without_grammars_says_so(engine_of: EngineOf, http_of: HttpOf, limits: ModelLimits) -> None:
    async with serving(engine_of(limits=msgspec.structs.replace(limits, grammars=""))) as served:
        answer = await complete(served, http_of, {"regex": "a"})
        assert served.engine.requests() == []
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "regex")


async def test_a_bomb_costs_its_sender_a_400_and_nobody_else_anything(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        served.manager.grammars = GrammarChecker(seconds=0.3)
        client = http_of(served)
        await complete(served, http_of, {"regex": "a+"})  # a worker is running
        body = {"model": "tiny", "prompt": "x"}
        bomb = asyncio.create_task(client.post("/v1/completions", json={**body, "guided_json": BOMB}, timeout=60))
        waits: list[float] = []
        while not bomb.done():
            began = time.monotonic()
            answer = await client.post("/v1/completions", json={**body, "regex": "a+"})
            waits.append(time.monotonic() - began)
            assert answer.status_code == 200
        error = (await bomb).json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "invalid_grammar", "guided_json")
    assert "too long" in error["message"]
    assert len(waits) > 5
    assert sorted(waits)[len(waits) * 9 // 10] < 1
