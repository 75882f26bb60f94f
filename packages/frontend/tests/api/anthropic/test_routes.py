"""/v1/messages through Anthropic's client, which validates strictly."""

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import httpx2
import msgspec
import pytest

from packages.frontend.tests.api.openai.tool_chat import prompt_of
from tercet.frontend.api.anthropic import routes
from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.testing import FakeEngine, Script, Served, Token, decode_spec, serving
from tercet.protocol.messages.messages import Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, GrammarKind, ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
AnthropicOf = Callable[..., anthropic.AsyncAnthropic]

BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
WEATHER: Any = {
    "name": "weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'


def saying(*texts: str, finish: FinishReason | None = None) -> Script:
    last = len(texts) - 1
    tokens = [Token(10 + place, text, finish if place == last else None) for place, text in enumerate(texts)]
    return lambda _request, _index: tokens


@pytest.fixture
async def anthropic_of() -> AsyncIterator[AnthropicOf]:
    clients: list[anthropic.AsyncAnthropic] = []

    def make(served: Served, **options: Any) -> anthropic.AsyncAnthropic:
        chosen: dict[str, Any] = {"api_key": "none", "max_retries": 0, **options}
        clients.append(anthropic.AsyncAnthropic(base_url=served.url, _strict_response_validation=True, **chosen))
        return clients[-1]

    yield make
    for client in clients:
        await client.close()


@pytest.fixture
def roomy(limits: ModelLimits) -> ModelLimits:
    """Return limits for long prompts with tools, and for grammars."""
    return msgspec.structs.replace(limits, context_length=2048, grammars="llguidance")


async def events_of(client: anthropic.AsyncAnthropic, **options: Any) -> list[Any]:
    stream = await client.messages.create(**{**BODY, "stream": True, **options})
    return [event async for event in stream]


async def test_a_message_is_answered(engine_of: EngineOf, anthropic_of: AnthropicOf) -> None:
    async with serving(engine_of()) as served:
        answer = await anthropic_of(served).messages.create(**BODY, system="be kind", metadata={"user_id": "me"})
        prompt = prompt_of(served)
    assert [(block.type, getattr(block, "text", "")) for block in answer.content] == [("text", "Hello world!")]
    assert (answer.role, answer.stop_reason, answer.stop_sequence) == ("assistant", "end_turn", None)
    assert answer.id.startswith("msg_")
    assert answer.usage.output_tokens == 4
    assert answer.usage.cache_read_input_tokens is not None
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(
        served.manager.models.get("tiny").tokenizer.encode(prompt, add_special_tokens=False)
    )
    assert prompt.index("system\nbe kind") < prompt.index("user\nhello")


async def test_a_stream_has_every_event_and_adds_up(
    engine_of: EngineOf, anthropic_of: AnthropicOf, http_of: HttpOf
) -> None:
    async with serving(engine_of()) as served:
        client = anthropic_of(served)
        raw = await http_of(served).post("/v1/messages", json={**BODY, "stream": True})
        async with client.messages.stream(**BODY) as stream:
            whole = await stream.get_final_message()
    names = [line.removeprefix("event: ") for line in raw.text.splitlines() if line.startswith("event: ")]
    assert names == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert names == [json.loads(line[6:])["type"] for line in raw.text.splitlines() if line.startswith("data: ")]
    assert (whole.content[0].type, whole.stop_reason) == ("text", "end_turn")
    assert whole.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("finish", "reason", "sequence"),
    [
        (FinishReason(FinishType.STOP, 258), "end_turn", None),
        (FinishReason(FinishType.STOP, "END"), "stop_sequence", "END"),
        (FinishReason(FinishType.LENGTH), "max_tokens", None),
    ],
)
async def test_why_it_stopped(
    finish: FinishReason, reason: str, sequence: str | None, engine_of: EngineOf, anthropic_of: AnthropicOf
) -> None:
    async with serving(engine_of(saying("Hello", " wor", finish=finish))) as served:
        client = anthropic_of(served)
        answer = await client.messages.create(**BODY, stop_sequences=["END"])
        events = await events_of(client, stop_sequences=["END"])
        assert decode_spec(served.engine.requests()[0]).stop == ["END"]
    assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence)
    [delta] = [event.delta for event in events if event.type == "message_delta"]
    assert (delta.stop_reason, delta.stop_sequence) == (reason, sequence)


async def test_tools_are_called_and_their_results_read(
    engine_of: EngineOf, anthropic_of: AnthropicOf, roomy: ModelLimits
) -> None:
    async with serving(engine_of(saying(*CALL), limits=roomy)) as served:
        client = anthropic_of(served)
        body = {**BODY, "max_tokens": 200}
        answer = await client.messages.create(**body, tools=[WEATHER])
        events = await events_of(client, tools=[WEATHER], max_tokens=200)
        [call] = answer.content
        assert call.type == "tool_use"
        assert (call.name, call.input, answer.stop_reason) == ("weather", {"city": "Oslo"}, "tool_use")
        parts = [event.delta.partial_json for event in events if event.type == "content_block_delta"]
        assert json.loads("".join(parts)) == {"city": "Oslo"}
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "rain in Oslo"}]},
            {"type": "text", "text": "and then?"},
        ]
        messages = [
            *BODY["messages"],
            {"role": "assistant", "content": [call.model_dump(exclude_none=True)]},
            {"role": "user", "content": results},
        ]
        await client.messages.create(**{**body, "messages": messages}, tools=[WEATHER])
        prompt = prompt_of(served)
    assert prompt.index("tool\nrain in Oslo") < prompt.index("user\nand then?")


async def test_the_model_reads_that_a_tool_failed_and_how_tools_are_used(
    engine_of: EngineOf, anthropic_of: AnthropicOf, roomy: ModelLimits
) -> None:
    use: Any = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
    failed: Any = {"type": "tool_result", "tool_use_id": "1", "content": "no such city", "is_error": True}
    tool: Any = {**WEATHER, "input_examples": [{"city": "Bergen"}], "allowed_callers": ["direct"]}
    messages: Any = [
        *BODY["messages"],
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [failed]},
    ]
    async with serving(engine_of(limits=roomy)) as served:
        await anthropic_of(served).messages.create(**{**BODY, "messages": messages}, tools=[tool])
        prompt = prompt_of(served)
    assert "tool\nError: no such city" in prompt
    assert r'"The weather.\nExamples:\n{\"city\":\"Bergen\"}"' in prompt


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_call_that_has_to_be_made_is_enforced(
    choice: Any, engine_of: EngineOf, anthropic_of: AnthropicOf, roomy: ModelLimits
) -> None:
    async with serving(engine_of(saying(*CALL), limits=roomy)) as served:
        await anthropic_of(served).messages.create(**BODY, tools=[WEATHER], tool_choice=choice)
        grammar = served.engine.requests()[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert "weather" in grammar.text


async def test_an_answer_keeps_to_a_schema(engine_of: EngineOf, anthropic_of: AnthropicOf, roomy: ModelLimits) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    async with serving(engine_of(limits=roomy)) as served:
        config: Any = {"format": {"type": "json_schema", "schema": schema}}
        await anthropic_of(served).messages.create(**BODY, output_config=config)
        grammar = served.engine.requests()[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.JSON_SCHEMA


async def test_thoughts_are_blocks_with_signatures_and_come_back(
    engine_of: EngineOf, anthropic_of: AnthropicOf, roomy: ModelLimits
) -> None:
    script = saying("<think>", "hmm, ", "rain?", "</think>", "It rains.")
    config = ServingConfig(reasoning_parser="qwen3")
    async with serving(engine_of(script, limits=roomy), config=config) as served:
        client = anthropic_of(served)
        enabled: Any = {"type": "enabled", "budget_tokens": 1024}
        options: dict[str, Any] = {"max_tokens": 1500, "thinking": enabled}
        answer = await client.messages.create(**{**BODY, **options})
        events = await events_of(client, **options)
        quiet: Any = {"type": "adaptive", "display": "omitted"}
        omitted = await client.messages.create(**BODY, thinking=quiet)
        thought, text = answer.content
        assert (thought.type, text.type) == ("thinking", "text")
        assert (thought.thinking, text.text) == ("hmm, rain?", "It rains.")
        assert thought.signature
        deltas = [event.delta for event in events if event.type == "content_block_delta"]
        assert [delta.type for delta in deltas if event_of_thought(delta)][-1] == "signature_delta"
        assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == "hmm, rain?"
        assert omitted.content[0].type == "thinking"
        assert (omitted.content[0].thinking, bool(omitted.content[0].signature)) == ("", True)
        said: Any = [*BODY["messages"], answer.to_param(), {"role": "user", "content": "why?"}]
        await client.messages.create(model="tiny", max_tokens=5, messages=said)
        assert "assistant\nIt rains." in prompt_of(served)


def event_of_thought(delta: Any) -> bool:
    return delta.type in {"thinking_delta", "signature_delta"}


async def test_an_assistants_last_message_is_gone_on_with(engine_of: EngineOf, anthropic_of: AnthropicOf) -> None:
    async with serving(engine_of()) as served:
        messages: Any = [*BODY["messages"], {"role": "assistant", "content": "Well, "}]
        await anthropic_of(served).messages.create(**{**BODY, "messages": messages})
        assert prompt_of(served).endswith("assistant\nWell, ")


async def test_a_model_that_does_not_reason_answers_claude_code(engine_of: EngineOf, http_of: HttpOf) -> None:
    more: dict[str, Any] = {
        "system": [{"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}}],
        "metadata": {"user_id": '{"device_id": "b63", "account_uuid": "", "session_id": "acc8451b"}'},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
    }
    async with serving(engine_of()) as served:
        ask = http_of(served).post
        plain = await ask("/v1/messages?beta=true", json=BODY | {"system": more["system"]})
        answer = await ask("/v1/messages?beta=true", json=BODY | more)
        first, second = served.engine.requests()
    assert (plain.status_code, answer.status_code) == (200, 200), answer.text
    assert first.input_ids == second.input_ids


async def test_tokens_are_counted_as_they_are_read(engine_of: EngineOf, anthropic_of: AnthropicOf) -> None:
    async with serving(engine_of()) as served:
        client = anthropic_of(served)
        count = await client.messages.count_tokens(model="tiny", messages=BODY["messages"], system="be kind")
        answer = await client.messages.create(**BODY, system="be kind")
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
WITH_IMAGES: Any = [
    {"role": "user", "content": "look"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "look", "input": {}}]},
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text", "text": "see"}, IMAGE]},
        ],
    },
]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: Images are not supported"),
        ({"messages": WITH_IMAGES}, "messages.2.content.0.content.1: Images are not supported"),
        ({"system": [{"type": "image", "source": {}}]}, "system.0: Content of type 'image'"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [{**WEATHER, "allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "'x'"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text: Missing required parameter: 'messages.0.content.0.text'.",
        ),
        ({"messages": [{"role": "user", "content": "hi", "mood": 1}]}, "messages.0.mood: Unknown"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "max_tokens"),
        ({"tool_choice": {"type": "tool"}}, "name"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": 1.5}, "temperature"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], named: str, engine_of: EngineOf, http_of: HttpOf
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/messages", json={**BODY, **fields})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("edits", "status"),
    [
        ([], 200),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], 200),
        ([{"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}}], 400),
        ([{"type": "clear_thinking_20251015", "keep": "all"}, {"type": "clear_tool_uses_20250919"}], 400),
        ({"0": "all"}, 400),
    ],
)
async def test_a_context_may_be_left_as_it_is(engine_of: EngineOf, http_of: HttpOf, edits: Any, status: int) -> None:
    body = {**BODY, "context_management": {"edits": edits}}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/messages?beta=true", json=body)
    assert answer.status_code == status


async def test_lengths_are_told_as_clients_look_for_them(engine_of: EngineOf, anthropic_of: AnthropicOf) -> None:
    async with serving(engine_of()) as served:
        counted = await anthropic_of(served).messages.count_tokens(model="tiny", messages=BODY["messages"])
        context = served.manager.models.get("tiny").context
        with pytest.raises(anthropic.BadRequestError) as together:
            await anthropic_of(served).messages.create(**{**BODY, "max_tokens": context})
        long: Any = [{"role": "user", "content": "hello " * context}]
        with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: \d+ tokens > {context} maximum"):
            await anthropic_of(served).messages.create(**{**BODY, "messages": long})
    numbers = f"{counted.input_tokens} + {context} > {context}"
    assert f"input length and `max_tokens` exceed context limit: {numbers}, decrease" in str(together.value)


async def test_errors_are_in_anthropics_words(engine_of: EngineOf, anthropic_of: AnthropicOf, http_of: HttpOf) -> None:
    def overloaded(request: TokenizedGenerateReqInput) -> Rejected:
        return Rejected(rid=request.rid, attempt=request.attempt, code="overloaded", message="full", retry=True)

    async with serving(engine_of(reject=overloaded), HttpConfig(api_key=("key",))) as served:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await anthropic_of(served).messages.create(**BODY)
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await anthropic_of(served, api_key="key").messages.create(**{**BODY, "model": "other"})
        with pytest.raises(anthropic.InternalServerError) as full:
            await anthropic_of(served, api_key="key").messages.create(**BODY)
        wrong = await http_of(served).get("/v1/messages", headers={"x-api-key": "key"})
    kinds = [error.value.body["error"]["type"] for error in (refused, unknown, full)]  # type: ignore[index]
    assert kinds == ["authentication_error", "not_found_error", "overloaded_error"]
    assert (wrong.status_code, wrong.json()["type"]) == (405, "error")


async def test_answers_and_errors_tell_the_id_of_the_request(
    engine_of: EngineOf, anthropic_of: AnthropicOf, http_of: HttpOf
) -> None:
    async with serving(engine_of()) as served:
        client = anthropic_of(served, default_headers={"x-request-id": "mine"})
        answer = await client.messages.create(**BODY)
        counted = await client.messages.with_raw_response.count_tokens(model="tiny", messages=BODY["messages"])
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**{**BODY, "model": "other"})
        wrong = await http_of(served).get("/v1/messages")
        models = await http_of(served).get("/v1/models")
    assert (answer._request_id, counted.request_id, unknown.value.request_id) == ("mine",) * 3
    assert unknown.value.body["request_id"] == "mine"  # type: ignore[index]
    assert wrong.json()["request_id"] == wrong.headers["request-id"] == wrong.headers["x-request-id"]
    assert "request-id" not in models.headers


async def test_a_failure_in_the_middle_is_an_error_event(engine_of: EngineOf, anthropic_of: AnthropicOf) -> None:
    broken = FinishReason(FinishType.ERROR, message="it broke")
    async with serving(engine_of(saying("Hello", " wor", finish=broken))) as served:
        with pytest.raises(anthropic.APIStatusError, match="it broke"):
            await events_of(anthropic_of(served))
        await served.until_idle()


async def test_an_internal_error_in_a_stream_is_one_event_without_details(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = routes._encoded

    def broken(change: dict[str, Any]) -> bytes:
        if change["type"] == "content_block_stop":
            raise RuntimeError("a secret")
        return told(change)

    monkeypatch.setattr(routes, "_encoded", broken)
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/messages", json={**BODY, "stream": True})
        await served.until_idle()
    last = json.loads(answer.text.splitlines()[-2].removeprefix("data: "))
    assert answer.status_code == 200
    assert (last["type"], last["error"]) == (
        "error",
        {"type": "api_error", "message": "The server failed this request."},
    )
    assert "a secret" in caplog.text
    assert "a secret" not in answer.text
