"""Raw chunks and completions, including fields that a client's types would fill in."""

import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tercet.frontend.api.openai.chat_writer import ChatWriter
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


async def test_rule_2_an_internal_error_in_a_stream_is_one_event_without_details(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: object, generation: object) -> bytes:
        raise RuntimeError("a secret")

    monkeypatch.setattr(ChatWriter, "end", broken)
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/chat/completions", json={**BODY, "stream": True})
        await served.until_idle()
    *chunks, last = [json.loads(line[6:]) for line in answer.text.splitlines() if line]
    assert answer.status_code == 200
    assert all(chunk["choices"] for chunk in chunks)
    assert last == {
        "error": {"message": "The server failed this request.", "type": "server_error", "param": None, "code": None}
    }
    assert "a secret" in caplog.text


async def test_rule_12_a_refusal_is_null_and_there(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        ask = http_of(served).post
        whole = (await ask("/v1/chat/completions", json={**BODY, "logprobs": True})).json()["choices"][0]
        streamed = await ask("/v1/chat/completions", json={**BODY, "logprobs": True, "stream": True})
    assert whole["message"] == {"role": "assistant", "content": "Hello world!", "refusal": None}
    assert set(whole["logprobs"]) == {"content", "refusal"}
    assert whole["logprobs"]["refusal"] is None
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.text.splitlines() if line.startswith("data: {")]
    scored = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None]
    assert chunks[0]["delta"]["refusal"] is None
    assert len(scored) == 4
    assert all(each["refusal"] is None for each in scored)
