"""Refusals of /v1/responses, with their parameter and status."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.messages import Rejected, TokenizedGenerateReqInput

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODY: dict[str, Any] = {"model": "tiny", "input": "hello"}
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept" / "responses.sqlite"))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_before_the_first_token_has_its_status(
    engine_of: EngineOf, http_of: HttpOf, store: StoreConfig, stream: bool
) -> None:
    def overloaded(request: TokenizedGenerateReqInput) -> Rejected:
        return Rejected(rid=request.rid, attempt=request.attempt, code="overloaded", message="full", retry=True)

    async with serving(engine_of(reject=overloaded), store=store) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, "stream": stream})
        await served.until_idle()
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (503, "overloaded", "server_error")
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": {"id": "conv_1", "name": "tea"}}, "conversation.name"),
        ({"conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "computer_call", "id": "1"}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input[0].call_id"),
        ({"input": None}, "input"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 100000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"nonsense": 1}, "nonsense"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"background": True, "store": False}, "background"),
        ({"background": True}, "store"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"tools": [{**WEATHER, "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{**WEATHER, "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
        ({"tools": [{**WEATHER, "async": True}]}, "tools[0].async"),
        ({"metadata": {str(place): "" for place in range(17)}}, "metadata"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(
    fields: dict[str, Any], param: str, engine_of: EngineOf, http_of: HttpOf
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/responses", json={**BODY, **fields})
        assert not served.manager.running
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("field", "place"),
    [("content", {"role": "user"}), ("output", {"type": "function_call_output", "call_id": "1"})],
)
async def test_the_model_takes_text_only(
    field: str, place: dict[str, Any], engine_of: EngineOf, http_of: HttpOf
) -> None:
    parts = [{"type": "input_text", "text": "See:"}, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}]
    async with serving(engine_of()) as served:
        call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
        answer = await http_of(served).post("/v1/responses", json={**BODY, "input": [call, {**place, field: parts}]})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", f"input[1].{field}[1]")
    assert "takes text only" in error["message"]


@pytest.mark.parametrize("route", ["/v1/responses", "/v1/chat/completions", "/v1/messages"])
async def test_nesting_that_could_not_be_written_back_is_refused(
    route: str, engine_of: EngineOf, http_of: HttpOf
) -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": [deep]}
    async with serving(engine_of()) as served:
        answer = await http_of(served).post(route, json={**BODY, "tools": [{**WEATHER, "parameters": deep}]})
        fine = await http_of(served).post(
            "/v1/responses", json={**BODY, "metadata": {str(n): "[" * 99 for n in range(9)}}
        )
    assert (answer.status_code, fine.status_code) == (400, 200)
    assert "nested deeper" in answer.text


async def test_without_a_store_there_is_no_response_to_go_on_from(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        with pytest.raises(openai.BadRequestError) as error:
            await openai_of(served).responses.create(**BODY, previous_response_id="resp_1")
    assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
