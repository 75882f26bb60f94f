"""A frontend that leaves finishes what it serves and sends everybody else away."""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tercet.frontend.config import HttpConfig
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.values import Phase

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "stream": True}


class ToldError(Exception):
    """A stream ended with an error event."""


async def begin(served: Served, http: httpx2.AsyncClient, engine: FakeEngine) -> "asyncio.Task[str]":
    """A stream that has been sent to a scheduler and waits for its tokens."""

    async def read() -> str:
        async with http.stream("POST", "/v1/completions", json=BODY) as answer:
            events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]
        for event in events:
            if "error" in event:
                raise ToldError(event["error"]["message"])
        return "".join(event["choices"][0]["text"] for event in events)

    task = asyncio.create_task(read())
    async with asyncio.timeout(10):
        while not engine.requests():  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)
    return task


async def test_streams_finish_while_new_requests_are_sent_away(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        stream = await begin(served, http_of(served), engine)
        engine.step()
        served.drain()
        assert served.manager.heartbeat("supervisor").phase is Phase.DRAINING
        http = http_of(served)
        for answer in (
            await http.get("/health"),
            await http.get("/v1/models"),
            await http.post("/v1/completions", json=BODY),
        ):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
            assert answer.json()["error"]["code"] == "service_unavailable"
        assert (await http.get("/live")).status_code == 200
        assert not served.ended.is_set()
        for _ in range(10):
            engine.step()
        assert await stream == "Hello world!"
        async with asyncio.timeout(10):
            await served.ended.wait()


async def test_an_idle_one_leaves_at_once(engine_of: EngineOf) -> None:
    async with serving(engine_of()) as served, asyncio.timeout(10):
        served.drain()
        await served.ended.wait()


@pytest.mark.parametrize("grace", [1, 30])
async def test_what_does_not_end_is_told_so_after_the_grace_or_the_second_time(
    engine_of: EngineOf, http_of: HttpOf, grace: int
) -> None:
    engine = engine_of(auto=False)
    async with serving(engine, HttpConfig(shutdown_grace=grace)) as served, asyncio.timeout(10):
        begun = await begin(served, http_of(served), engine)
        not_begun = asyncio.create_task(http_of(served).post("/v1/completions", json={**BODY, "stream": False}))
        while len(engine.requests()) < 2:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)
        engine.running[1:] = []
        engine.step()
        served.drain()
        if grace == 30:
            served.drain()
        await served.ended.wait()
        assert (await not_begun).status_code == 503
        with pytest.raises(ToldError, match="leaving"):
            await begun


async def test_a_shared_socket_is_left_to_the_others(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        ours.setblocking(False)
        async with serving(engine, HttpConfig(fd=os.dup(ours.fileno()))) as served, asyncio.timeout(10):
            stream = await begin(served, http_of(served), engine)
            served.drain()
            loop = asyncio.get_running_loop()
            with socket.create_connection(ours.getsockname()) as client:
                accepted, address = await loop.sock_accept(ours)
                accepted.close()
                assert address == client.getsockname()
            for _ in range(10):
                engine.step()
            assert await stream == "Hello world!"
