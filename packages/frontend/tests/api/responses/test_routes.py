"""/v1/responses through OpenAI's client, which validates strictly."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from openai.types.responses import FunctionToolParam, Response, ResponseStreamEvent
from tokenizers import Tokenizer

from packages.frontend.tests.api.openai.tool_chat import prompt_of
from tercet.frontend.api.responses import routes
from tercet.frontend.config.config import ServingConfig, StoreConfig
from tercet.frontend.testing import FakeEngine, Script, Served, Token, serving
from tercet.protocol.messages.values import FinishReason, FinishType, GrammarKind, ModelLimits

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODY: dict[str, Any] = {"model": "tiny", "input": "hello"}
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
CALL = '[{"name": "weather", "arguments": {"city": "Oslo"}}]'


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept" / "responses.sqlite"))


def saying(*texts: str, finish: FinishReason | None = None) -> Script:
    last = len(texts) - 1
    tokens = [Token(10 + place, text, finish if place == last else None) for place, text in enumerate(texts)]
    return lambda _request, _index: tokens


def spelling(tokenizer: Tokenizer, *texts: str) -> Script:
    """Return a script that emits the token ids of each text; a text comes with its last token."""
    tokens = []
    for text in texts:
        *before, last = tokenizer.encode(text, add_special_tokens=False).ids
        tokens += [*(Token(each, "") for each in before), Token(last, text)]
    return lambda _request, _index: tokens


async def stream_of(client: openai.AsyncOpenAI, **options: Any) -> list[ResponseStreamEvent]:
    stream = await client.responses.create(**{**BODY, "stream": True, **options})
    return [event async for event in stream]


async def test_a_response_is_made(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        answer = await openai_of(served).responses.create(**BODY, metadata={"a": "b"}, user="me")
    assert answer.output_text == "Hello world!"
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.id.startswith("resp_frontend-0-")
    assert (answer.metadata, answer.user) == ({"a": "b"}, "me")
    assert answer.completed_at is not None
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4
    assert answer.usage.input_tokens_details.cached_tokens == answer.usage.input_tokens // 2


async def test_rule_20_events_in_order_with_names_numbers_and_no_done(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    names = [line.removeprefix("event: ") for line in answer.text.splitlines() if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data:")]
    assert "[DONE]" not in answer.text
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 4,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_a_stream_adds_up_to_the_response(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served, openai_of(served).responses.stream(**BODY) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        whole = await stream.get_final_response()
    assert "".join(deltas) == whole.output_text == "Hello world!"
    assert whole.usage is not None


async def test_length_makes_it_incomplete(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        client = openai_of(served)
        whole = await client.responses.create(**BODY, max_output_tokens=2)
        events = await stream_of(client, max_output_tokens=2)
    for answer in (whole, getattr(events[-1], "response", None)):
        assert isinstance(answer, Response)
        assert answer.status == "incomplete"
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert answer.output[0].status == "incomplete"  # type: ignore[union-attr]
    assert events[-1].type == "response.incomplete"


async def test_a_failure_in_the_middle_is_the_last_event(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    broken = FinishReason(FinishType.ERROR, message="it broke")
    async with serving(engine_of(saying("Hello", " wor", finish=broken))) as served:
        events = await stream_of(openai_of(served))
        await served.until_idle()
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error is not None
    assert (events[-1].response.error.code, events[-1].response.error.message) == ("server_error", "it broke")


async def test_calls_of_functions(engine_of: EngineOf, openai_of: OpenAIOf, limits: ModelLimits) -> None:
    roomy = msgspec.structs.replace(limits, context_length=2048)
    async with serving(engine_of(saying(*CALL), limits=roomy)) as served:
        client = openai_of(served)
        whole = await client.responses.create(**BODY, tools=[WEATHER])
        events = await stream_of(client, tools=[WEATHER])
        [call] = whole.output
        assert call.type == "function_call"
        assert (call.name, json.loads(call.arguments), call.status) == ("weather", {"city": "Oslo"}, "completed")
        deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
        assert json.loads("".join(deltas)) == {"city": "Oslo"}
        [done] = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert done.arguments == "".join(deltas)
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain in Oslo"}
        asked: list[Any] = [{"role": "user", "content": "hello"}, call.model_dump(exclude_none=True), result]
        await client.responses.create(model="tiny", input=asked, tools=[WEATHER])
        assert "rain in Oslo" in prompt_of(served)


@pytest.mark.parametrize("options", [{}, {"exclude_none": True}, {"by_alias": True}], ids=str)
async def test_items_come_back_however_a_client_writes_them_down(
    options: Any, engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig, limits: ModelLimits
) -> None:
    roomy = msgspec.structs.replace(limits, context_length=2048)
    parameters = {**(WEATHER["parameters"] or {}), "additionalProperties": False}
    parsing: Any = {**WEATHER, "strict": True, "parameters": parameters}
    async with serving(engine_of(saying(*CALL), limits=roomy), store=store) as served:
        client = openai_of(served, strict=False)
        async with client.responses.stream(**BODY, tools=[parsing]) as stream:
            parsed = await stream.get_final_response()
        [call] = parsed.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        went_on = await client.responses.create(model="tiny", input=[result], previous_response_id=parsed.id)
        listed = await client.responses.input_items.list(went_on.id, order="asc")
        dumped: list[Any] = [{"role": "user", "content": "hello"}, call.model_dump(**options), result]
        tools: list[Any] = [tool.model_dump(**options) for tool in parsed.tools]
        await client.responses.create(model="tiny", input=dumped, tools=tools)
        again: list[Any] = [item.model_dump(**options) for item in listed.data]
        await client.responses.create(model="tiny", input=again)
        went, *_ = [request.input_ids for request in served.engine.requests()[1:]]
        assert served.engine.requests()[-1].input_ids == went


async def test_reasoning_is_an_item_that_is_counted_and_goes_on(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig, tokenizer: Tokenizer
) -> None:
    script = spelling(tokenizer, "<think>", "hmm, ", "rain?", "</think>", "\n\nIt rains.")
    config = ServingConfig(reasoning_parser="qwen3")
    async with serving(engine_of(script), config=config, store=store) as served:
        client = openai_of(served)
        whole = await client.responses.create(**BODY)
        events = await stream_of(client)
        reasoning, message = whole.output
        assert (reasoning.type, message.type) == ("reasoning", "message")
        assert reasoning.content is not None
        assert [part.text for part in reasoning.content] == ["hmm, rain?"]
        assert whole.output_text.strip() == "It rains."
        assert whole.usage is not None
        assert whole.usage.output_tokens_details.reasoning_tokens == len(
            tokenizer.encode("<think>hmm, rain?</think>").ids
        )
        thoughts = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
        assert "".join(thoughts) == "hmm, rain?"
        assert await client.responses.retrieve(whole.id) == whole
        again = await client.responses.create(model="tiny", input="why?", previous_response_id=whole.id)
        assert again.status == "completed"
        assert "It rains." in prompt_of(served)


@pytest.mark.parametrize(
    ("wanted", "kind", "told"),
    [
        ({"type": "json_object"}, GrammarKind.JSON_SCHEMA, '"object"'),
        (
            {"type": "json_schema", "name": "p", "schema": {"type": "object", "properties": {"age": {"const": 7}}}},
            GrammarKind.JSON_SCHEMA,
            '"age"',
        ),
    ],
)
async def test_text_keeps_to_its_format(
    wanted: Any, kind: GrammarKind, told: str, engine_of: EngineOf, openai_of: OpenAIOf, limits: ModelLimits
) -> None:
    reads = msgspec.structs.replace(limits, grammars="llguidance")
    async with serving(engine_of(limits=reads)) as served:
        answer = await openai_of(served).responses.create(**BODY, text={"format": wanted})
        grammar = served.engine.requests()[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is kind
    assert told in grammar.text
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == wanted["type"]


async def test_a_schema_that_cannot_be_enforced_is_refused_by_its_keyword(
    engine_of: EngineOf, http_of: HttpOf, limits: ModelLimits
) -> None:
    reads = msgspec.structs.replace(limits, grammars="llguidance")
    schema = {"type": "object", "properties": {"a": {"not": {}}}}
    async with serving(engine_of(limits=reads)) as served:
        body = {**BODY, "text": {"format": {"type": "json_schema", "name": "p", "schema": schema}}}
        answer = await http_of(served).post("/v1/responses", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text.format.schema"
    assert "not" in answer.json()["error"]["message"]


async def test_what_a_client_parsed_comes_back_with_its_text(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    said: Any = {"type": "output_text", "text": "{}", "annotations": [], "parsed": {}}
    async with serving(engine_of()) as served:
        for part in (said, {key: said[key] for key in said.keys() - {"parsed"}}):
            items: Any = [{"type": "message", "role": "assistant", "content": [part]}, {"role": "user", "content": "x"}]
            await openai_of(served).responses.create(model="tiny", input=items)
        parsed, plain = served.engine.requests()
    assert parsed.input_ids == plain.input_ids


async def test_logprobs_when_included(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    include: list[Any] = ["message.output_text.logprobs"]
    async with serving(engine_of()) as served:
        client = openai_of(served)
        whole = await client.responses.create(**BODY, include=include, top_logprobs=2)
        events = await stream_of(client, include=include, top_logprobs=2)
        plain = await client.responses.create(**BODY)
    part = whole.output[0].content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert [(each.logprob, len(each.top_logprobs)) for each in part.logprobs] == [(-0.5, 2)] * 4
    streamed = [event.logprobs for event in events if event.type == "response.output_text.delta"]
    assert [len(each) for each in streamed] == [1, 1, 1, 1]
    assert plain.output[0].content[0].logprobs == []


async def test_what_says_nothing_to_a_model_that_calls_at_once_is_taken(
    engine_of: EngineOf, openai_of: OpenAIOf, limits: ModelLimits
) -> None:
    more: Any = {"output_schema": {"type": "string"}, "allowed_callers": ["direct"], "defer_loading": False}
    roomy = msgspec.structs.replace(limits, context_length=2048)
    async with serving(engine_of(limits=roomy)) as served:
        client = openai_of(served)
        plain = await client.responses.create(**BODY, tools=[WEATHER])
        answer = await client.responses.create(
            **BODY, tools=[{**WEATHER, **more, "async": False}], reasoning={"context": "auto", "mode": "standard"}
        )
        first, second = served.engine.requests()
    assert first.input_ids == second.input_ids
    assert answer.tools == plain.tools


async def test_input_tokens_are_those_of_the_response(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        client = openai_of(served)
        made = await client.responses.create(**BODY, instructions="be kind")
        count = await client.responses.input_tokens.count(**BODY, instructions="be kind")
    assert made.usage is not None
    assert count.input_tokens == made.usage.input_tokens


async def test_a_client_that_leaves_ends_its_response(engine_of: EngineOf, http_of: HttpOf, store: StoreConfig) -> None:
    async with serving(engine_of(saying(*["x"] * 60), auto=False), store=store) as served:
        asking = asyncio.create_task(http_of(served).post("/v1/responses", json=BODY))
        while not served.engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await served.until_idle()
        assert not served.engine.running


async def test_an_internal_error_in_a_stream_fails_the_response_without_details(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = routes._encoded

    def broken(log: Any, changes: list[dict[str, Any]]) -> bytes:
        if any(change["type"] == "response.completed" for change in changes):
            raise RuntimeError("a secret")
        return told(log, changes)

    monkeypatch.setattr(routes, "_encoded", broken)
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, "stream": True})
        await served.until_idle()
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert answer.status_code == 200
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "The server failed this response."}
    assert "a secret" in caplog.text
    assert "a secret" not in answer.text


async def test_penalties_apply_and_are_repeated(engine_of: EngineOf, http_of: HttpOf) -> None:
    asked = {"presence_penalty": 1.5, "frequency_penalty": -1, "repetition_penalty": 1.2}
    async with serving(engine_of()) as served:
        http = http_of(served)
        answer = (await http.post("/v1/responses", json={**BODY, **asked})).json()
        plain = (await http.post("/v1/responses", json=BODY)).json()
        wrong = await http.post("/v1/responses", json={**BODY, "presence_penalty": 3})
        sampling = served.engine.requests()[0].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.5, -1, 1.2)
    assert (answer["presence_penalty"], answer["frequency_penalty"]) == (1.5, -1)
    assert (plain["presence_penalty"], plain["frequency_penalty"]) == (0, 0)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "presence_penalty")
