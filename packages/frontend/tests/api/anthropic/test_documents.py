"""Documents and search results whose content is text, in messages and in the results of tools."""

from collections.abc import Callable
from typing import Any

import httpx2
import msgspec
import pytest

from packages.frontend.tests.api.openai.tool_chat import prompt_of
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

PLAIN = {"type": "text", "media_type": "text/plain", "data": "the quick fox"}
PARTS = {"type": "content", "content": [{"type": "text", "text": "the quick"}, {"type": "text", "text": "fox"}]}
SEARCHED = {
    "type": "search_result",
    "source": "https://a.example",
    "title": "Foxes",
    "content": [{"type": "text", "text": "the quick fox"}],
    "citations": {"enabled": True},
}
USE = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}


def document(source: Any, **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


def body(*blocks: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        (document(PLAIN), "the quick fox"),
        (document(PARTS), "the quick\nfox"),
        (document({"type": "content", "content": "the quick fox"}), "the quick fox"),
        (
            document(PLAIN, title="Foxes", context="A book.", citations={"enabled": True}, cache_control=None),
            "Foxes\nA book.\nthe quick fox",
        ),
        (SEARCHED, "Foxes\nhttps://a.example\nthe quick fox"),
    ],
)
async def test_text_documents_are_text(
    engine_of: EngineOf, http_of: HttpOf, limits: ModelLimits, block: Any, text: str
) -> None:
    asked = {"type": "text", "text": "who jumps?"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [block, asked]}
    calls = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [result]}]
    roomy = msgspec.structs.replace(limits, context_length=2048)
    async with serving(engine_of(limits=roomy)) as served:
        http = http_of(served)
        answer = await http.post("/v1/messages", json=body(block, asked))
        assert answer.status_code == 200, answer.text
        assert f"user\n{text}\nwho jumps?" in prompt_of(served)
        counted = await http.post("/v1/messages/count_tokens", json={**body(block, asked), "max_tokens": None})
        assert counted.status_code == 400
        as_result = {**body(asked), "messages": [*body(asked)["messages"], *calls]}
        answer = await http.post("/v1/messages", json=as_result)
        assert answer.status_code == 200, answer.text
        assert f"tool\n{text}\nwho jumps?" in prompt_of(served)


@pytest.mark.parametrize(
    ("block", "where"),
    [
        (document({"type": "base64", "media_type": "application/pdf", "data": "AAAA"}), "messages.0.content.0.source"),
        (document({"type": "url", "url": "https://a.example/a.pdf"}), "messages.0.content.0.source"),
        (document({"type": "file", "file_id": "f"}), "messages.0.content.0.source"),
        (
            document({"type": "content", "content": [{"type": "image", "source": {}}]}),
            "messages.0.content.0.source.content.0",
        ),
        (document({**PLAIN, "media_type": "text/html"}), "messages.0.content.0.source.media_type"),
        (document({"data": "x"}), "messages.0.content.0.source.type"),
    ],
)
async def test_other_documents_are_refused_by_their_source(
    engine_of: EngineOf, http_of: HttpOf, block: Any, where: str
) -> None:
    async with serving(engine_of()) as served:
        answer = await http_of(served).post("/v1/messages", json=body(block))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{where}: ")


async def test_context_management_that_keeps_all_is_taken_for_counting(engine_of: EngineOf, http_of: HttpOf) -> None:
    asked = {name: value for name, value in body({"type": "text", "text": "hello"}).items() if name != "max_tokens"}
    keep: Any = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    clear: Any = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    managements: list[Any] = [None, {"edits": []}, keep, clear]
    async with serving(engine_of()) as served:
        http = http_of(served)
        counts = [
            await http.post("/v1/messages/count_tokens", json={**asked, "context_management": each})
            for each in managements
        ]
    assert [answer.status_code for answer in counts] == [200, 200, 200, 400]
    assert len({answer.json()["input_tokens"] for answer in counts[:3]}) == 1
    assert counts[3].json()["error"]["message"].startswith("context_management: ")
