"""`stop_reason` and `matched_stop` of a choice, whole and streamed: the stop string or token that ended it."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from packages.frontend.tests.api.openai.tool_chat import BODY as WITH_TOOLS
from packages.frontend.tests.api.openai.tool_chat import CALL, saying, tool_engine
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
}
END = 258


async def choices(http: httpx2.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the choice of a whole answer, and the last chunk's of a streamed one."""
    whole = (await http.post(path, json=body)).json()["choices"][0]
    streamed = await http.post(path, json={**body, "stream": True})
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [chunk for chunk in chunks[:-1] if "stop_reason" in chunk or chunk["finish_reason"]] == []
    return [whole, chunks[-1]]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("finish", "named", "matched"),
    [
        (FinishReason(FinishType.STOP, "END"), "END", "END"),
        (FinishReason(FinishType.STOP, 7), 7, 7),
        (FinishReason(FinishType.STOP, END), None, END),
        (FinishReason(FinishType.LENGTH), None, None),
    ],
    ids=["string", "token", "end token", "length"],
)
async def test_the_cause_of_the_end_is_given(
    engine_of: EngineOf, http_of: HttpOf, path: str, finish: FinishReason, named: Any, matched: Any
) -> None:
    body = {"model": "tiny", "stop": ["END"], "stop_token_ids": [7], **ROUTES[path]}
    async with serving(engine_of(lambda _request, _index: [Token(10, "a"), Token(11, "b", finish)])) as served:
        found = await choices(http_of(served), path, body)
    assert [(each["stop_reason"], each["matched_stop"]) for each in found] == [(named, matched)] * 2
    assert [each["finish_reason"] for each in found] == [finish.type] * 2


async def test_so_it_is_for_an_answer_with_calls(
    engine_of: EngineOf, http_of: HttpOf, files: dict[str, bytes], limits: ModelLimits
) -> None:
    script = saying(CALL, FinishReason(FinishType.STOP, 7))
    async with serving(tool_engine(engine_of, files, limits, script)) as served:
        found = await choices(http_of(served), "/v1/chat/completions", {**WITH_TOOLS, "stop_token_ids": [7]})
    assert [(each["finish_reason"], each["stop_reason"]) for each in found] == [("tool_calls", 7)] * 2


@pytest.mark.parametrize("path", ROUTES)
async def test_every_counted_token_has_a_logprob(engine_of: EngineOf, http_of: HttpOf, path: str) -> None:
    """The end token is one of them, as in the token ids and in /generate."""
    tokens = [Token(10, "a"), Token(11, "b"), Token(END, "", FinishReason(FinishType.STOP, END))]
    options = {"logprobs": True} if "chat" in path else {"logprobs": 1}
    body = {"model": "tiny", "return_token_ids": True, **options, **ROUTES[path]}
    async with serving(engine_of(lambda _request, _index: tokens)) as served:
        http = http_of(served)
        answer = (await http.post(path, json=body)).json()
        streamed = await http.post(path, json={**body, "stream": True})
        native = (await http.post("/generate", json={"text": "hello", "return_logprob": True})).json()
        include = ["message.output_text.logprobs"]
        response = (
            await http.post("/v1/responses", json={"model": "tiny", "input": "hello", "include": include})
        ).json()
    [choice] = answer["choices"]
    assert len(scored(choice)) == len(choice["token_ids"]) == answer["usage"]["completion_tokens"] == 3
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert [each for chunk in chunks for each in scored(chunk)] == scored(choice)
    meta = native["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 3
    [item] = response["output"]
    assert len(item["content"][0]["logprobs"]) == response["usage"]["output_tokens"] == 3


def scored(choice: dict[str, Any]) -> list[Any]:
    logprobs = choice["logprobs"] or {}
    return logprobs.get("content") or logprobs.get("token_logprobs") or []


async def test_an_answer_may_have_no_content_beside_calls(
    engine_of: EngineOf, http_of: HttpOf, files: dict[str, bytes], limits: ModelLimits
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    said = {"role": "assistant", "content": [], "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": []}
    prompts = []
    async with serving(tool_engine(engine_of, files, limits, saying("x"))) as served:
        http = http_of(served)
        for messages in ([said, result], [{**said, "content": None}, {**result, "content": ""}]):
            body = {**WITH_TOOLS, "messages": [*WITH_TOOLS["messages"], *messages]}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            prompts.append(served.engine.requests()[-1].input_ids)
        alone = await http.post("/v1/chat/completions", json={**WITH_TOOLS, "messages": [{**said, "tool_calls": []}]})
    assert prompts[0] == prompts[1]
    assert (alone.status_code, alone.json()["error"]["param"]) == (400, "messages[0].content")
