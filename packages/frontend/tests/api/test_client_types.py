"""Answers have every field that the types of the installed clients require, with the right type, whole and streamed.

The clients themselves accept answers without required fields, so the JSON is validated here. Anthropic documents its
nullable fields as always present; they are optional in its types, and required here.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic.types as claude
import httpx2
import msgspec
import pytest
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.conversations import (
    Conversation,
    ConversationDeletedResource,
    ConversationItem,
    ConversationItemList,
)
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from pydantic import BaseModel, TypeAdapter

from packages.frontend.tests import encoders
from packages.frontend.tests.api.openai.test_chat_reasoning import TEMPLATE
from packages.frontend.tests.api.openai.tool_chat import CALL, WEATHER, saying
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import EncodingEngine, FakeEngine, Served, serving
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

USER = [{"role": "user", "content": "Weather?"}]
THOUGHTS = "<think>\nhmm\n</think>\n\nI look.\n"
CUSTOM = {"type": "custom", "custom": {"name": "get_weather"}}
FUNCTION = {"type": "function", **WEATHER["function"], "strict": None}
CHAT = {"model": "tiny", "messages": USER, "max_tokens": 200}
TEXT = {"model": "tiny", "prompt": "hello", "max_tokens": 200}
RESPONSE = {"model": "tiny", "input": "Weather?", "max_output_tokens": 200}
CLAUDE = {"model": "tiny", "messages": USER, "max_tokens": 200}
CLAUDE_TOOL = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}

CASES: list[tuple[str, Any, Any, list[dict[str, Any]]]] = [
    (
        "/v1/chat/completions",
        ChatCompletion,
        ChatCompletionChunk,
        [
            CHAT,
            {**CHAT, "tools": [WEATHER], "n": 2, "stream_options": {"include_usage": True}},
            {**CHAT, "tools": [CUSTOM], "logprobs": True, "top_logprobs": 1},
            {**CHAT, "functions": [WEATHER["function"]]},
            {**CHAT, "prediction": {"type": "content", "content": "I look."}},
        ],
    ),
    (
        "/v1/completions",
        Completion,
        Completion,
        [TEXT, {**TEXT, "n": 2, "logprobs": 1, "stream_options": {"include_usage": True}}],
    ),
    (
        "/v1/responses",
        Response,
        ResponseStreamEvent,
        [
            RESPONSE,
            {**RESPONSE, "tools": [FUNCTION], "include": ["message.output_text.logprobs"], "top_logprobs": 1},
            {**RESPONSE, "tools": [{"type": "custom", "name": "get_weather"}], "reasoning": {"effort": "low"}},
            {
                **RESPONSE,
                "max_output_tokens": 3,
                "presence_penalty": 1,
                "frequency_penalty": -1,
                "metadata": {"a": "b"},
            },
        ],
    ),
    (
        "/v1/messages",
        claude.Message,
        claude.RawMessageStreamEvent,
        [CLAUDE, {**CLAUDE, "tools": [CLAUDE_TOOL], "thinking": {"type": "adaptive"}}, {**CLAUDE, "max_tokens": 3}],
    ),
]


def instances(value: Any) -> Iterator[BaseModel]:
    """Yield the models in a validated value."""
    if isinstance(value, BaseModel):
        yield value
        for name in value.__class__.model_fields:
            yield from instances(getattr(value, name))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from instances(each)


def check(kind: Any, data: Any) -> None:
    """Check that an answer has the required fields of a type; for Anthropic's types, every field."""
    checked = TypeAdapter(kind).validate_json(json.dumps(data), strict=True)
    for each in instances(checked):
        if type(each).__module__.startswith("anthropic."):
            assert type(each).model_fields.keys() - each.model_fields_set == set(), (type(each).__name__, data)


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


def as_typed(kind: Any, event: dict[str, Any]) -> dict[str, Any]:
    """Return an event as OpenAI types it: chunks of completions have a finish reason there before the end, too."""
    if kind is Completion:
        for choice in event["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    return event


@pytest.fixture
def engine(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> FakeEngine:
    roomy = msgspec.structs.replace(limits, context_length=2048)
    said = saying(THOUGHTS + CALL, FinishReason(FinishType.STOP, 258))
    return engine_of(said, files={**files, "chat_template.jinja": TEMPLATE.encode()}, limits=roomy)


@pytest.mark.parametrize(("path", "whole", "event", "bodies"), CASES, ids=[path for path, *_ in CASES])
async def test_generated_answers_are_of_the_clients_types(
    engine: FakeEngine, http_of: HttpOf, path: str, whole: Any, event: Any, bodies: list[dict[str, Any]]
) -> None:
    async with serving(engine) as served:
        http = http_of(served)
        for body in bodies:
            answer = await http.post(path, json={name: body[name] for name in body.keys() - {"stream_options"}})
            assert answer.status_code == 200, answer.text
            check(whole, answer.json())
            streamed = events_of(await http.post(path, json={**body, "stream": True}))
            assert len(streamed) > 3
            for each in streamed:
                if each.get("type") != "ping" and CUSTOM not in body.get("tools", ()):  # no type of a chunk has them
                    check(event, as_typed(event, each))


async def test_the_answers_say_something(engine: FakeEngine, http_of: HttpOf) -> None:
    """Reasoning, text and calls all occur, or the types above are not those of calls."""
    async with serving(engine) as served:
        http = http_of(served)
        chat = (await http.post("/v1/chat/completions", json=CASES[0][3][1] | {"stream_options": None})).json()
        message = (await http.post("/v1/messages", json=CASES[3][3][1])).json()
        response = (await http.post("/v1/responses", json=CASES[2][3][1])).json()
    said = chat["choices"][1]["message"]
    assert all(said[name] for name in ("content", "tool_calls", "reasoning_content"))
    assert {block["type"] for block in message["content"]} == {"thinking", "text", "tool_use"}
    assert {item["type"] for item in response["output"]} == {"reasoning", "message", "function_call"}


async def test_other_answers_are_of_the_clients_types(engine: FakeEngine, http_of: HttpOf, tmp_path: Path) -> None:
    item = {"type": "message", "role": "user", "content": "hello"}
    store = StoreConfig(response_store=str(tmp_path / "responses.sqlite"))
    async with serving(engine, store=store) as served:
        http = http_of(served)

        async def ask(kind: Any, method: str, path: str, body: Any = None, **headers: str) -> Any:
            answer = await http.request(method, path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            check(kind, answer.json())
            return answer.json()

        await ask(Model, "GET", "/v1/models/tiny")
        for card in (await http.get("/v1/models")).json()["data"]:
            check(Model, card)
        await ask(claude.ModelInfo, "GET", "/v1/models/tiny", **{"anthropic-version": "2023-06-01"})
        await ask(claude.MessageTokensCount, "POST", "/v1/messages/count_tokens", {"model": "tiny", "messages": USER})
        await ask(InputTokenCountResponse, "POST", "/v1/responses/input_tokens", {"model": "tiny", "input": "hello"})
        made = (await ask(Response, "POST", "/v1/responses", RESPONSE))["id"]
        await ask(Response, "GET", f"/v1/responses/{made}")
        await ask(ResponseItemList, "GET", f"/v1/responses/{made}/input_items")
        background = (await ask(Response, "POST", "/v1/responses", {**RESPONSE, "background": True}))["id"]
        await ask(Response, "POST", f"/v1/responses/{background}/cancel")
        talk = f"/v1/conversations/{(await ask(Conversation, 'POST', '/v1/conversations', {'items': [item]}))['id']}"
        await ask(Conversation, "GET", talk)
        await ask(Conversation, "POST", talk, {"metadata": {"a": "b"}})
        listed = await ask(ConversationItemList, "POST", f"{talk}/items", {"items": [item]})
        await ask(ConversationItemList, "GET", f"{talk}/items")
        await ask(ConversationItem, "GET", f"{talk}/items/{listed['first_id']}")
        await ask(Conversation, "DELETE", f"{talk}/items/{listed['first_id']}")
        await ask(ConversationDeletedResource, "DELETE", talk)
        refused = await http.post("/v1/messages", json={})
        check(claude.ErrorResponse, refused.json())


async def test_embeddings_are_of_the_clients_types(http_of: HttpOf) -> None:
    encoding = EncodingEngine(lambda _request, _index: [], encoders.files(), encoders.limits())
    async with serving(encoding) as served:
        answer = await http_of(served).post("/v1/embeddings", json={"model": "encoder", "input": ["cat", "dog"]})
    check(CreateEmbeddingResponse, answer.json())
