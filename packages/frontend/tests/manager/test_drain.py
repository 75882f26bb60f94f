"""Draining: requests in flight and on their way are still served."""

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.server.protocol import HttpLimits
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import Phase

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

BODY: dict[str, Any] = {"model": "tiny", "prompt": "hello", "stream": True}


class StreamError(Exception):
    """Error event at the end of a stream."""


async def begin(served: Served, http: httpx2.AsyncClient, engine: FakeEngine) -> "asyncio.Task[str]":
    """Start a stream that waits for its tokens at a scheduler."""

    async def read() -> str:
        async with http.stream("POST", "/v1/completions", json=BODY) as answer:
            events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]
        for event in events:
            if "error" in event:
                raise StreamError(event["error"]["message"])
        return "".join(event["choices"][0]["text"] for event in events)

    task = asyncio.create_task(read())
    async with asyncio.timeout(10):
        while not engine.requests():  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.001)
    return task


async def test_streams_finish_while_new_requests_are_sent_away(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine, limits=HttpLimits(last_call_seconds=0)) as served:
        stream = await begin(served, http_of(served), engine)
        engine.step()
        served.drain()
        assert served.manager.heartbeat("supervisor").phase is Phase.DRAINING
        http = http_of(served)
        for answer in (await http.get("/health"), await http.post("/v1/completions", json=BODY)):
            assert answer.status_code == 503
            assert answer.headers["retry-after"] == "1"
            assert answer.headers["connection"] == "close"
            assert answer.json()["error"]["code"] == "service_unavailable"
        assert (await http.get("/live")).status_code == 200
        assert (await http.get("/v1/models")).status_code == 200
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
        with pytest.raises(StreamError, match="leaving"):
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


@pytest.mark.parametrize("shared", [False, True])
async def test_what_was_on_its_way_is_served(engine_of: EngineOf, http_of: HttpOf, shared: bool) -> None:
    """Idle, kept-alive and half-read connections are served."""
    engine = engine_of()
    with socket.create_server(("127.0.0.1", 0)) as ours:
        config = HttpConfig(fd=os.dup(ours.fileno())) if shared else HttpConfig()
        async with serving(engine, config) as served, asyncio.timeout(10):
            kept_alive = http_of(served)
            await kept_alive.get("/live")
            request = post(json.dumps({**BODY, "stream": False}))
            silent, half = await connection(served), await connection(served, request[:60])
            served.drain()
            assert (await half.rest(request[60:])).startswith(b"HTTP/1.1 200")
            assert (await silent.rest(request)).startswith(b"HTTP/1.1 200")
            answer = await kept_alive.post("/v1/completions", json={**BODY, "stream": False})
            assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            await served.ended.wait()


async def test_at_a_shared_socket_nobody_is_sent_away(engine_of: EngineOf, http_of: HttpOf) -> None:
    """However late: no other process can answer on a connection that this one has accepted."""
    engine = engine_of(auto=False)
    with socket.create_server(("127.0.0.1", 0)) as ours:
        async with (
            serving(engine, HttpConfig(fd=os.dup(ours.fileno())), limits=HttpLimits(last_call_seconds=0)) as served,
            asyncio.timeout(10),
        ):
            late = await connection(served)
            stream = await begin(served, http_of(served), engine)
            served.drain()
            await asyncio.sleep(0.3)
            answer = asyncio.create_task(late.rest(post(json.dumps(BODY))))
            while len(engine.requests()) < 2:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
            for _ in range(10):
                engine.step()
            assert await stream == "Hello world!"
            assert (await answer).startswith(b"HTTP/1.1 200")
            await served.ended.wait()


async def test_a_connection_that_brings_nothing_holds_nobody_up(engine_of: EngineOf) -> None:
    async with serving(engine_of()) as served, asyncio.timeout(10):
        silent = await connection(served)
        served.drain()
        assert await silent.rest() == b""
        await served.ended.wait()


async def test_an_answer_under_way_may_be_followed_by_one_more(engine_of: EngineOf) -> None:
    """The head of its answer promised to read another request, sent as soon as the answer ends."""
    engine = engine_of(auto=False)
    async with serving(engine) as served, asyncio.timeout(10):
        client = await begun(served, engine)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"connection: close" not in head.lower()
        served.drain()
        for _ in range(10):
            engine.step()
        assert (await client.reader.readuntil(b"0\r\n\r\n")).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        last = await client.rest(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
        assert last.startswith(b"HTTP/1.1 200")
        assert b"connection: close" in last.lower()
        await served.ended.wait()


async def test_a_connection_is_not_waited_for_long_after_its_answer(engine_of: EngineOf) -> None:
    """Its client may send nothing more."""
    engine = engine_of(auto=False)
    async with serving(engine) as served, asyncio.timeout(10):
        client = await begun(served, engine)
        served.drain()
        for _ in range(10):
            engine.step()
        assert (await client.rest()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        await served.ended.wait()


class Connection(NamedTuple):
    """Client that writes raw bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def rest(self, data: bytes = b"") -> bytes:
        """Send, and read until the server closes the connection."""
        self.writer.write(data)
        answer = await self.reader.read()
        self.writer.close()
        return answer


async def connection(served: Served, data: bytes = b"") -> Connection:
    """Open a connection that the server has accepted."""
    known = len(served.server.server_state.connections)
    host, port = served.url.removeprefix("http://").split(":")
    client = Connection(*await asyncio.open_connection(host, int(port)))
    client.writer.write(data)
    while len(served.server.server_state.connections) == known:  # noqa: ASYNC110 - nothing tells
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    return client


async def begun(served: Served, engine: FakeEngine) -> Connection:
    """Open a connection whose answer has begun."""
    client = await connection(served, post(json.dumps(BODY)))
    while not engine.requests():  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.001)
    engine.step()
    return client


def post(body: str) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()
