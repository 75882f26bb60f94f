"""Unread responses stay within a memory budget, and short ones are sent beside them."""

import asyncio
import json
from collections.abc import Callable

import httpx2
import pytest
from starlette.types import Message

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.http import backpressure
from tercet.frontend.http.backpressure import BackpressuredSend, response_budget
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.testing import FakeEngine, Served, Token, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

TEXTS = ["x" * 400_000] * 50  # more than sockets hold
BODY = json.dumps({"text": "hello", "sampling_params": {"max_new_tokens": 50}}).encode()
JSON = {"content-type": "application/json"}
ASK = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"


async def until(http: httpx2.AsyncClient, status: int) -> httpx2.Response:
    """Return the first response with this status."""
    async with asyncio.timeout(20):
        while (answer := await http.post("/generate", content=BODY, headers=JSON)).status_code != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return answer


async def test_answers_that_nobody_reads_are_not_kept_without_end(
    engine_of: EngineOf, http_of: HttpOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backpressure, "_LONG_RESPONSE_BYTES", 2 << 20)
    engine = engine_of(lambda _request, _index: [Token(5, text) for text in TEXTS])
    async with serving(engine, HttpConfig(max_body_bytes=2 << 20)) as served, asyncio.timeout(60):
        port = int(served.url.rpartition(":")[2])
        clients = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(4)]
        for _, writer in clients:
            writer.write(ASK % (len(BODY), BODY))
        http = http_of(served)
        refused = await until(http, 503)
        assert refused.json()["error"]["code"] == "overloaded"
        assert refused.headers["retry-after"] == "1"
        assert (await http.post("/tokenize", json={"prompt": "hello"})).status_code == 200
        for _, writer in clients:
            writer.transport.abort()
        assert (await until(http, 200)).json()["text"] == "".join(TEXTS)


@pytest.mark.parametrize("length", [0, 1, 65_536, 65_537, 200_000])
async def test_a_long_answer_is_the_same_in_pieces(length: int) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    room, body = MemoryBudget(1 << 20), bytes(range(256)) * (length // 256) + b"x" * (length % 256)
    with room.reserve("") as space:
        paced = BackpressuredSend(send, space)
        await paced({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % length)]})
        await paced({"type": "http.response.body", "body": body})
        assert room.used == max(0, length - 65_536)
    assert b"".join(each["body"] for each in sent[1:]) == body
    assert all(len(each["body"]) <= 65_536 for each in sent[1:])
    assert [each["more_body"] for each in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert room.used == 0


@pytest.mark.parametrize("length", [5 * 32 << 20, 3 << 30], ids=["long", "longer than all room"])
async def test_any_answer_has_room_where_its_key_has_no_other(length: int) -> None:
    """Vectors as JSON may exceed the budget, and a client that retries would be refused every time."""

    async def send(_: Message) -> None: ...

    room = response_budget(1024)
    begin = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % length)]}
    with room.reserve("other") as taken, room.reserve("key") as first, room.reserve("key") as second:
        taken.grow(8 * 32 << 20)
        answers = [BackpressuredSend(send, space) for space in (first, second)]
        for answer in answers:
            await answer(begin)
        assert [answer.refusal is None for answer in answers] == [True, False]
