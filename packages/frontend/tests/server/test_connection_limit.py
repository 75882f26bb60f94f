"""A client with many open connections does not lock out others."""

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest

from tercet.frontend.server.protocol import HttpLimits
from tercet.frontend.testing import FakeEngine, Served, Token, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]
LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
UPLOAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9999\r\n\r\n{"
MOST = 8
FEW = HttpLimits(connections=MOST)


@contextlib.asynccontextmanager
async def connections(served: Served, count: int, begin: bytes) -> AsyncIterator[list[Connection]]:
    """Open `count` connections one after the other, and begin something on each."""
    made: list[Connection] = []
    for _ in range(count):
        made.append(await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2])))
        made[-1][1].write(begin)
        if begin.startswith(LIVE):
            await made[-1][0].readuntil(b"}")
    yield made
    for _, writer in made:
        writer.close()


@pytest.mark.parametrize(
    "begin", [b"", b"GET /li", LIVE, UPLOAD, LIVE + UPLOAD], ids=["silent", "a head", "kept", "a body", "a body behind"]
)
async def test_those_that_wait_longest_make_room(engine_of: EngineOf, http_of: HttpOf, begin: bytes) -> None:
    async with (
        serving(engine_of(), limits=FEW) as served,
        connections(served, 3 * MOST, begin) as made,
        asyncio.timeout(20),
    ):
        for _ in range(3):
            assert (await http_of(served).post("/generate", json={"text": "hello"})).status_code == 200
        for reader, _ in made[: 2 * MOST]:
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer = made[-1][1]
        writer.write(LIVE if begin == b"" else b"")
        if begin == b"":
            assert await made[-1][0].readuntil(b"}")


async def test_many_that_come_at_once_are_not_all_accepted_before_some_make_room(engine_of: EngineOf) -> None:
    """Each connection takes a file descriptor, and connections of other processes need some meanwhile."""

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with serving(engine_of(), limits=FEW) as served, asyncio.timeout(20):
        address = ("127.0.0.1", int(served.url.rpartition(":")[2]))
        with contextlib.ExitStack() as stack:
            clients = [stack.enter_context(socket.create_connection(address)) for _ in range(400)]
            before = most = files()
            while select.select(clients, [], [], 0)[0] != clients[:-MOST]:
                await asyncio.sleep(0)
                most = max(most, files())
    assert most - before < 250


async def test_an_answer_under_way_is_nobody_s_to_end(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(lambda _request, _index: [Token(5, "x")], auto=False)
    async with serving(engine, limits=FEW) as served, asyncio.timeout(20):
        asked = asyncio.create_task(http_of(served).post("/generate", json={"text": "hello"}))
        while not engine.running:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.002)
        async with connections(served, 3 * MOST, b""):
            assert (await http_of(served).get("/live")).status_code == 200
            engine.step()
            assert (await asked).json()["text"] == "x"


async def test_where_all_work_a_new_one_is_turned_away(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(lambda _request, _index: [Token(5, "x")], auto=False)
    async with serving(engine, limits=FEW) as served, asyncio.timeout(20):
        asked = [asyncio.create_task(http_of(served).post("/generate", json={"text": "a"})) for _ in range(MOST)]
        while len(engine.running) < MOST:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.002)
        async with connections(served, 1, b"") as [(reader, _)]:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        engine.step()
        assert {(await each).status_code for each in asked} == {200}


@pytest.mark.parametrize(("hard", "most"), [(4096, 4096 - 512), (300, 150)])
def test_as_many_as_the_process_may_have_but_for_what_the_parts_need(hard: int, most: int) -> None:
    code = (
        "import resource; from tercet.frontend.server.connection_limit import max_connections as room;"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}));"
        "print(room(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert lines.split() == [str(most), str(hard)]


def test_idle_connections_take_no_descriptor_that_the_parts_need(tmp_path: Path) -> None:
    """The limit is low, and hundreds of silent clients must not exhaust it."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    words = [sys.executable, "-m", "tercet.frontend", f"--port={port}", f"--listen=ipc://{tmp_path}/run"]
    process = subprocess.Popen(["bash", "-c", 'ulimit -n 256; exec "$@"', "bash", *words])
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        with contextlib.ExitStack() as stack:
            for _ in range(500):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                client.sendall(LIVE)
                assert client.recv(15) == b"HTTP/1.1 200 OK"
            assert len(os.listdir(f"/proc/{process.pid}/fd")) < 256 - 64
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
