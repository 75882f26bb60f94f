"""Limits of bodies, so that reading one never blocks the event loop for long."""

import asyncio
import json
import sys
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.types import Message

from tercet.frontend.api.openai.chat_schema import ChatRequest
from tercet.frontend.api.openai.completion_schema import CompletionRequest
from tercet.frontend.api.openai.embedding_schema import EmbeddingCreate
from tercet.frontend.api.sglang.generate_schema import Detokenize, NativeGenerate
from tercet.frontend.errors import BadRequestError
from tercet.frontend.http.loop_turns import LoopTurns
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.http.request_body import MAX_ITEMS, MAX_VALUES, read_json, read_model
from tercet.frontend.http.sse import ClientDisconnectedError

LIMIT = 64 << 20


def asking(value: Any, *, stays: bool = True) -> Request:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()

    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await (asyncio.Event().wait() if stays else asyncio.sleep(0))
            return {"type": "http.disconnect"}
        return messages.pop()

    app = FastAPI()
    app.state.body_budget = MemoryBudget(LIMIT)
    app.state.loop_turns = LoopTurns()
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")], "app": app}
    return Request(scope, receive)


async def read(value: Any) -> object:
    return await read_json(asking(value), LIMIT)


MANY = MAX_VALUES + 1


@pytest.mark.parametrize(
    "value",
    [
        {"a": [{}] * MANY},
        {f"key{number}": 1 for number in range(MANY)},
        {"a": {"b": {f"key{number}": 1 for number in range(MANY)}}},
        {"a": [[[]]] * (MANY // 2)},
        b"[" + b"[],[]," * 8 * MAX_VALUES + b"[]]",
    ],
    ids=["objects", "keys", "inner keys", "arrays", "far too many"],
)
async def test_too_many_values_are_refused(value: Any) -> None:
    with pytest.raises(BadRequestError, match=f"more than {MAX_VALUES} values"):
        await read(value)


@pytest.mark.parametrize(
    "value",
    [{"prompt": [5] * 3 * MANY}, {"prompt": "{[:" * 2 * MANY}, {"messages": [{"role": "user"}] * 16_384}],
    ids=["ids", "text", "messages"],
)
async def test_what_people_send_is_read(value: Any) -> None:
    assert await read(value) == value


async def test_too_many_items_are_refused() -> None:
    with pytest.raises(BadRequestError, match=f"more than {MAX_ITEMS} items"):
        await read(b'{"prompt":[' + b"5," * (MAX_ITEMS + 1) + b"5]}")


async def test_what_is_refused_for_its_values_is_never_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing 32 MiB of members takes a second and blocks the loop."""

    def parsed(_: object) -> object:
        raise AssertionError("parsed")

    monkeypatch.setattr(orjson, "loads", parsed)
    with pytest.raises(BadRequestError, match=f"more than {MAX_VALUES} values"):
        await read(b"{" + b",".join(b'"%d":1' % number for number in range(2_000_000)) + b"}")


async def test_a_body_is_not_looked_through_for_a_client_that_is_gone() -> None:
    """Otherwise many abandoned bodies would delay the shutdown."""
    request = asking(b'{"prompt":"' + b'\\"a\\":1,' * 500_000 + b'"}', stays=False)
    turns = request.app.state.loop_turns
    await turns.turn("another")
    with pytest.raises(ClientDisconnectedError):
        await read_json(request, LIMIT)
    assert turns.waiting <= 1


async def test_heavy_bodies_are_parsed_and_validated_in_turns() -> None:
    request = asking({"model": "m", "prompt": [5] * 100_000})
    turns = request.app.state.loop_turns
    turns._busy = True  # a turn of another task that has not ended
    reading = asyncio.ensure_future(read_model(request, CompletionRequest, LIMIT))
    for _ in range(100):  # the steps before it may fit into a slice, or wait as well
        await asyncio.sleep(0)
    assert turns.waiting == 1
    turns._give_next()
    assert (await reading).prompt == [5] * 100_000


async def test_a_body_nested_without_end_is_refused() -> None:
    with pytest.raises(BadRequestError, match="nested deeper than 128 levels"):
        await read(b"[" * 200 + b"]" * 200)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ([], None, "The body must be a JSON object."),
        ({"model": "m", "prompt": "a", "stop": ["a"] * 65}, "stop", "at most 64 items"),
        ({"model": "m", "prompt": "a", "stop": 5}, "stop", "valid string"),
        ({"model": "m", "prompt": [5, "a"]}, "prompt[1]", "valid integer"),
        ({"model": "m", "prompt": ["a", 5]}, "prompt[1]", "valid string"),
        ({"model": "m", "prompt": [[5], ["a"]]}, "prompt[1][0]", "valid integer"),
    ],
)
async def test_a_refusal_is_of_the_form_that_came_closest(body: Any, param: str | None, words: str) -> None:
    with pytest.raises(BadRequestError, match=words) as error:
        await read_model(asking(body), CompletionRequest, LIMIT)
    assert (error.value.param or "").startswith(param or "")


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"messages": [{"content": "a"}]}, "messages[0].role", "Missing required parameter: 'messages[0].role'."),
        ({"messages": [{"role": "bot", "content": "a"}]}, "messages[0].role", "should be one of 'system',"),
        ({"messages": [{"role": None, "content": "a"}]}, "messages[0].role", "'messages[0].role'"),
        ({"messages": [{"role": "assistant", "content": [{}]}]}, "messages[0].content[0].type", "Missing required"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "should be one of 'text', 'json_object',"),
    ],
)
async def test_of_what_kind_an_object_is_its_own_field_says(given: dict[str, Any], param: str, message: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **given}
    with pytest.raises(BadRequestError) as error:
        await read_model(asking(body), ChatRequest, LIMIT)
    assert (error.value.param, message in error.value.message) == (param, True)


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionRequest, {"model": "m", "prompt": ["a", 5] * 1000}),
        (CompletionRequest, {"model": "m", "prompt": [[5, "a"] * 1000] * 100}),
        (NativeGenerate, {"input_ids": [-1] * 1000}),
        (Detokenize, {"tokens": ["a"] * 1000}),
        (EmbeddingCreate, {"model": "m", "input": ["a", 5] * 1000}),
    ],
)
def test_one_wrong_item_of_a_list_is_enough(schema: type[BaseModel], body: dict[str, Any]) -> None:
    """Validation stops at the first error, because a list may have millions of items."""
    with pytest.raises(ValidationError) as error:
        schema.model_validate(body)
    assert error.value.error_count() < 10


@pytest.mark.parametrize("value", [{"prompt": [5] * 10_000}, {"prompt": [["a"] * 1_000] * 10}], ids=["ids", "batch"])
async def test_plain_values_of_an_array_are_not_looked_at_one_by_one(value: dict[str, Any]) -> None:
    body, calls = json.dumps({**value, "stop": [[]] * 200}).encode(), 0

    def count(_frame: object, _event: str, _given: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        await read(body)
    finally:
        sys.setprofile(None)
    assert calls < 5_000
