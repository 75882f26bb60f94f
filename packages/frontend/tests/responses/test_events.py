"""However a response is asked for, and wherever it is cut, it is the same; its events lead to it step by step."""

import dataclasses
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer

from packages.frontend.tests import tool_chat
from packages.frontend.tests.responses.event_rules import Event, checked
from tercet.frontend.config import ServingConfig, StoreConfig
from tercet.frontend.testing import FakeEngine, Served, Token, serving
from tercet.protocol.values import FinishReason, FinishType, ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

THOUGHT = "<think>\nhmm, rain?\n</think>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
BODY: dict[str, Any] = {
    "model": "tiny",
    "input": "hello",
    "tools": [{"type": "function", "name": "weather"}],
    "include": ["message.output_text.logprobs"],
    "seed": 4,
}
CONFIG = ServingConfig(reasoning_parser="qwen3", tool_call_parser="hermes")


def spoken(tokenizer: Tokenizer, text: str) -> list[Token]:
    """A text in the ids that the model's tokenizer has for it; a character comes when it is whole."""
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


def said(body: Event) -> Event:
    """A response without what tells one from another that says the same."""
    own = {"id", "created_at", "completed_at", "background"}
    output = [{key: item[key] for key in item.keys() - {"id", "call_id"}} for item in body["output"]]
    return {**{key: body[key] for key in body.keys() - own}, "output": output}


async def every_way(http: httpx2.AsyncClient, body: dict[str, Any]) -> Event:
    """The response, asked for at once, as a stream, in the background, and once more by its id."""
    whole: Event = (await http.post("/v1/responses", json=body)).json()
    stream = checked(await streamed(http, "POST", "/v1/responses", json={**body, "stream": True}))
    events = await streamed(http, "POST", "/v1/responses", json={**body, "stream": True, "background": True})
    behind = checked(events, background=True)
    assert said(whole) == said(stream) == said(behind)
    for each in (whole, stream, behind):
        assert (await http.get(f"/v1/responses/{each['id']}")).json() == each
    middle = len(events) // 2
    again = f"/v1/responses/{behind['id']}?stream=true&starting_after={middle}"
    assert await streamed(http, "GET", again) == events[middle + 1 :]
    return whole


def spelt(part: dict[str, Any]) -> str:
    return bytes(byte for each in part["logprobs"] for byte in each["bytes"]).decode(errors="ignore")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n",
        THOUGHT,
        f"{THOUGHT}\n\nIt rains, été 🌍.",
        f"{THOUGHT}I look.\n{CALL}\n{CALL}",
        f"{CALL} Well.",
        "<tool_<tool_call>\nnone\n</tool_call>\n\nno call",
    ],
)
async def test_a_response_is_the_same_however_it_is_asked_for_and_cut(
    text: str,
    tmp_path: Path,
    engine_of: EngineOf,
    http_of: HttpOf,
    files: dict[str, bytes],
    limits: ModelLimits,
    tokenizer: Tokenizer,
) -> None:
    tokens = spoken(tokenizer, text)
    engine = tool_chat.tool_engine(engine_of, files, limits, lambda _request, _index: tokens)
    async with serving(engine, config=CONFIG, store=StoreConfig(response_store=str(tmp_path / "r.sqlite"))) as served:
        http = http_of(served)
        for most in (*range(1, len(tokens), 6), None):
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


@pytest.mark.parametrize("after", [2, 7, 12, 20])
async def test_a_stop_string_ends_it_in_every_way(
    after: int,
    tmp_path: Path,
    engine_of: EngineOf,
    http_of: HttpOf,
    files: dict[str, bytes],
    limits: ModelLimits,
    tokenizer: Tokenizer,
) -> None:
    tokens = spoken(tokenizer, f"{THOUGHT}I look.\n{CALL}")[:after]
    tokens[-1] = dataclasses.replace(tokens[-1], text="", finish=FinishReason(FinishType.STOP, "STOP"))
    engine = tool_chat.tool_engine(engine_of, files, limits, lambda _request, _index: tokens)
    async with serving(engine, config=CONFIG, store=StoreConfig(response_store=str(tmp_path / "r.sqlite"))) as served:
        whole = await every_way(http_of(served), {**BODY, "stop": "STOP"})
    assert whole["status"] == "completed"
