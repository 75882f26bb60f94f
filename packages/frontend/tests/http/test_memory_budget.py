"""Long bodies stay within a memory budget, and short ones are accepted beside them."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable

import httpx2
import orjson
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.errors import UnavailableError
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.server import app
from tercet.frontend.testing import FakeEngine, Served, Token, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

LONGEST = 1 << 20
JSON = {"content-type": "application/json"}
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    % LONGEST
)
SHORT = {"model": "tiny", "prompt": "hello"}


async def begun(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a client that sends most of a long body, and waits."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HEAD + b" " * (LONGEST - 1))
    await writer.drain()
    return reader, writer


async def test_what_many_clients_send_is_bounded_and_free_again_when_they_leave(
    engine_of: EngineOf, http_of: HttpOf
) -> None:
    async with serving(engine_of(), HttpConfig(max_body_bytes=LONGEST)) as served:
        clients = [await begun(served) for _ in range(24)]
        heads = [asyncio.create_task(reader.readuntil(b"\r\n\r\n")) for reader, _ in clients]
        async with asyncio.timeout(20):  # 17 fit, because the first 64 KiB of each are free
            while len(refused := [each.result() for each in heads if each.done()]) < 7:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(refused) < 24
        assert all(b"HTTP/1.1 503" in each and b"retry-after: 1" in each for each in refused)
        http = http_of(served)
        assert (await http.post("/v1/completions", json=SHORT)).status_code == 200
        for head, (_, writer) in zip(heads, clients, strict=True):
            head.cancel()
            writer.close()
        body = json.dumps(SHORT).encode().ljust(LONGEST)
        async with asyncio.timeout(10):
            while (await http.post("/v1/completions", content=body, headers=JSON)).is_error:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def test_one_key_leaves_half_of_the_room_to_others() -> None:
    budget = MemoryBudget(1 << 20)
    with budget.reserve("mine") as mine, budget.reserve("yours") as yours:
        mine.grow(budget.limit // 2)
        with budget.reserve("mine") as other, pytest.raises(UnavailableError, match="long requests"):
            other.grow(1 << 20)
        yours.grow(budget.limit // 2)
    assert budget.used == 0


def test_a_body_that_is_alone_may_be_parsed_whatever_it_costs() -> None:
    budget = MemoryBudget(1 << 20)
    with budget.reserve("mine") as mine:
        for _ in range(16):
            mine.read(b"10,11," * (1 << 14))
        assert mine.used > budget.limit
        with budget.reserve("yours") as yours, pytest.raises(UnavailableError):
            yours.grow(1 << 20)
    assert budget.used == 0


@pytest.mark.parametrize(
    "text", ["plain text", "[1000,2000,3000,4000]", '{"a":1,"b":"c","d":{}}', "wide 🎉 text", "\\ud83c"]
)
def test_what_is_parsed_of_a_body_takes_no_more_than_is_counted(text: str) -> None:
    body = (
        json.dumps([text] * 2000, ensure_ascii=False) if text[0] not in "[{" else f"[{','.join([text] * 9000)}]"
    ).encode()
    budget = MemoryBudget(1 << 30)
    with budget.reserve("") as reservation:
        for start in range(0, len(body), 1000):
            reservation.read(body[start : start + 1000])
        tracemalloc.start()
        parsed = orjson.loads(body)
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert parsed
        assert used - 65_536 <= reservation.used + 65_536


async def test_a_body_keeps_its_room_until_its_request_ends(engine_of: EngineOf, http_of: HttpOf) -> None:
    """Parsed values are held as long: a running stream holds its prompt."""
    engine = engine_of(lambda _request, _index: [Token(5, "x")] * 3, auto=False)
    budget = MemoryBudget(1)
    body = json.dumps({**SHORT, "max_tokens": 3, "user": "x" * 200}).encode().ljust(LONGEST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "MemoryBudget", lambda _longest: budget)
        budget.limit = 5 * LONGEST
        async with serving(engine, HttpConfig(max_body_bytes=LONGEST)) as served:
            http = http_of(served)
            asked = [asyncio.create_task(http.post("/v1/completions", content=body, headers=JSON)) for _ in range(5)]
            async with asyncio.timeout(10):
                while len(engine.running) < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            assert budget.used > 4 * LONGEST
            refused = await http.post("/v1/completions", content=body, headers=JSON)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            async with asyncio.timeout(10):
                while not all(each.done() for each in asked):
                    engine.step()
                    await asyncio.sleep(0.002)
            assert [(await each).status_code for each in asked] == [200] * 5
            assert budget.used == 0


def test_a_body_is_counted_once_however_it_arrives() -> None:
    budget = MemoryBudget(1 << 20)
    with budget.reserve("") as reservation:
        for length in range(0, 1 << 20, 10_000):
            reservation.grow(length)
        assert budget.used == length - 65_536
