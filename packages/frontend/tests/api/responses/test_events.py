"""Equality of responses over all ways to request them, and consistency of their events."""

import asyncio
import dataclasses
import json
import sqlite3
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tokenizers import Tokenizer

from packages.frontend.tests.api.openai import tool_chat
from packages.frontend.tests.api.responses.event_rules import Event, checked
from tercet.frontend.config.config import ServingConfig, StoreConfig
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
Saying = Callable[[list[Token]], AbstractAsyncContextManager[Served]]

ADDED = "response.output_item.added"
THOUGHT = "<think>\nhmm, rain?\n</think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** \\"\\u00e9\\" \\ud83c\\udf0d\\n"}}\n</tool_call>'
BODY: dict[str, Any] = {
    "model": "tiny",
    "input": "hello",
    "tools": [{"type": "function", "name": "weather"}, {"type": "custom", "name": "patch"}],
    "include": ["message.output_text.logprobs"],
}
CONFIG = ServingConfig(reasoning_parser="qwen3", tool_call_parser="hermes")


@pytest.fixture
def saying(tmp_path: Path, engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> Saying:
    """Return a frontend with a response store, in front of a model that emits these tokens."""

    def serve(tokens: list[Token]) -> AbstractAsyncContextManager[Served]:
        engine = tool_chat.tool_engine(engine_of, files, limits, lambda _request, _index: tokens)
        return serving(engine, config=CONFIG, store=StoreConfig(response_store=str(tmp_path / "r.sqlite")))

    return serve


def spoken(tokenizer: Tokenizer, text: str) -> list[Token]:
    """Return the tokens of a text; a character comes with its last token."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    tokens, told = [], ""
    for number, token_id in enumerate(ids, 1):
        said = tokenizer.decode(ids[:number], skip_special_tokens=False)
        said = said if number == len(ids) else said.rstrip("\ufffd")
        tokens.append(Token(token_id, said[len(told) :], logprob=-float(number)))
        told = said
    return tokens


async def streamed(http: httpx2.AsyncClient, method: str, path: str, **options: Any) -> list[Event]:
    answer = await http.request(method, path, **options)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


def comparable(body: Event) -> Event:
    """Return a response without the fields that differ between equal responses."""
    own = {"id", "created_at", "completed_at", "background"}
    output = [{key: item[key] for key in item.keys() - {"id", "call_id"}} for item in body["output"]]
    return {**{key: body[key] for key in body.keys() - own}, "output": output}


async def every_way(http: httpx2.AsyncClient, body: dict[str, Any]) -> Event:
    """Return the response, requested as a whole, as a stream, in the background, and retrieved by id."""
    body = {**body, "seed": 4}
    whole: Event = (await http.post("/v1/responses", json=body)).json()
    stream = checked(await streamed(http, "POST", "/v1/responses", json={**body, "stream": True}))
    events = await streamed(http, "POST", "/v1/responses", json={**body, "stream": True, "background": True})
    behind = checked(events, background=True)
    assert comparable(whole) == comparable(stream) == comparable(behind)
    for each in (whole, stream, behind):
        assert (await http.get(f"/v1/responses/{each['id']}")).json() == each
    middle = len(events) // 2
    again = f"/v1/responses/{behind['id']}?stream=true&starting_after={middle}"
    assert await streamed(http, "GET", again) == events[middle + 1 :]
    return whole


def spelt(part: dict[str, Any]) -> str:
    return bytes(byte for each in part["logprobs"] for byte in each["bytes"]).decode(errors="ignore")


@pytest.mark.parametrize("cuts", [4, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        THOUGHT,
        f"{THOUGHT}\n\nIt rains, été 🌍.",
        f"{THOUGHT}I look.\n{CALL}\n{CALL}",
        f"{CALL} Well.",
        PATCH,
        "<tool_<tool_call>\nnone\n</tool_call>\n\nno call",
    ],
)
async def test_a_response_is_the_same_however_it_is_asked_for_and_cut(
    text: str, cuts: int, saying: Saying, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    tokens = spoken(tokenizer, text)
    async with saying(tokens) as served:
        http = http_of(served)
        for most in (*range(1, len(tokens), max(6, len(tokens) // cuts)), None):
            whole = await every_way(http, {**BODY, "max_output_tokens": most})
            assert whole["status"] == ("incomplete" if most else "completed")
            assert whole["usage"]["output_tokens"] == (most or len(tokens))
            for part in (item["content"][0] for item in whole["output"] if item["type"] == "message"):
                assert spelt(part) == part["text"], "the log-probabilities are those of the text and of nothing else"


@pytest.mark.parametrize(
    ("finish", "told"),
    [(None, "no such table: responses"), (FinishReason(FinishType.ERROR, message="it broke"), "it broke")],
    ids=["whole", "broken"],
)
async def test_a_store_that_fails_is_told_of_behind_all_that_was_said(
    finish: FinishReason | None, told: str, tmp_path: Path, engine_of: EngineOf, http_of: HttpOf
) -> None:
    tokens = [Token(10, "Hello"), Token(11, " world", finish)]
    store = StoreConfig(response_store=str(tmp_path / "r.sqlite"))
    async with serving(engine_of(lambda _request, _index: tokens), store=store) as served:
        with sqlite3.connect(store.response_store) as connection:
            connection.execute("DROP TABLE responses")
        connection.close()
        body = {"model": "tiny", "input": "hello", "stream": True}
        last = checked(await streamed(http_of(served), "POST", "/v1/responses", json=body))
    assert (last["status"], last["completed_at"]) == ("failed", None)
    assert told in last["error"]["message"]
    assert last["output"][0]["content"][0]["text"] == "Hello world"


@pytest.mark.parametrize(
    ("steps", "call"), [(0, CALL), (1, CALL), (16, CALL), (40, CALL), (100, CALL), (50, PATCH), (100, PATCH)]
)
async def test_what_is_cancelled_keeps_what_it_has_said(
    steps: int, call: str, saying: Saying, openai_of: Callable[..., openai.AsyncOpenAI], tokenizer: Tokenizer
) -> None:
    async with saying(spoken(tokenizer, f"{THOUGHT}I look at it.\n{call}")) as served:
        engine = served.engine
        engine.auto = False
        responses = openai_of(served).responses
        stream = await responses.create(**BODY, stream=True, background=True)
        told: list[Event] = [(await anext(stream)).to_dict(mode="json")]
        response = told[0]["response"]["id"]
        while not engine.running:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
        for _ in range(steps):
            engine.step()
            await asyncio.sleep(0.002)
        if steps:
            while (running := await responses.retrieve(response)).status == "queued":  # noqa: ASYNC110
                await asyncio.sleep(0.002)
            assert running.output == []
        cancelled = await responses.cancel(response)
        told += [event.to_dict(mode="json") async for event in stream]
        await served.until_idle()
        assert cancelled.status == "cancelled"
        assert await responses.retrieve(response) == cancelled
        items: list[Event] = [item.to_dict(mode="json") for item in cancelled.output]
        assert [item["id"] for item in items] == [event["item"]["id"] for event in told if event["type"] == ADDED]
        for place, item in enumerate(items):
            own = [event for event in told if event.get("output_index") == place]
            done = own[-1]["type"] == "response.output_item.done"
            assert item["status"] == ("completed" if done else "incomplete")
            text = item.get("arguments", item.get("input"))
            text = item["content"][0]["text"] if text is None else text
            deltas = [event for event in own if "delta" in event]
            assert text == "".join(event["delta"] for event in deltas)
            if item["type"] == "message":
                assert item["content"][0]["logprobs"] == [each for event in deltas for each in event["logprobs"]]
        engine.auto = True
        await responses.create(model="tiny", input="go on", previous_response_id=response)
        prompt = tool_chat.prompt_of(served, engine.requests()[-1])
        said = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        assert all(text in prompt for text in said)


@pytest.mark.parametrize("after", [2, 7, 12, 20])
async def test_a_stop_string_ends_it_in_every_way(
    after: int, saying: Saying, http_of: HttpOf, tokenizer: Tokenizer
) -> None:
    tokens = spoken(tokenizer, f"{THOUGHT}I look.\n{CALL}")[:after]
    tokens[-1] = dataclasses.replace(tokens[-1], text="", finish=FinishReason(FinishType.STOP, "STOP"))
    async with saying(tokens) as served:
        whole = await every_way(http_of(served), {**BODY, "stop": "STOP"})
    assert whole["status"] == "completed"
