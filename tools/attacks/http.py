"""Requests of an attacker: many at once over plain sockets, as large as it likes, and nothing checked."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from tools.attacks.attack import SECONDS

_READ = 1 << 18
_SHOWN = 4096


def head(url: str, key: str, method: str, path: str, *headers: str) -> bytes:
    """Return the head of a request that the server answers and then hangs up."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}", "Connection: close"]
    lines += [f"Authorization: Bearer {key}", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, "", ""]).encode()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect to the server."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def send(url: str, *pieces: bytes) -> bytes:
    """Send the bytes of a request and return the first `_SHOWN` bytes of the answer, once all of it was read."""
    first = b""
    with contextlib.suppress(OSError):
        async with connected(url) as (reader, writer):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
            while data := await reader.read(_READ):
                first += data[: _SHOWN - len(first)]
    return first


async def post(url: str, key: str, path: str, body: bytes | dict[str, Any]) -> bytes:
    """Post a body, which is JSON or is meant to look like it."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await send(url, head(url, key, "POST", path, f"Content-Length: {len(content)}"), content)


async def model_of(url: str, key: str) -> str:
    """Return the name of the first model."""
    answer = await send(url, head(url, key, "GET", "/v1/models"))
    found = re.search(rb'"id":"([^"]+)"', answer)
    if found is None:
        raise RuntimeError(f"{url}/v1/models lists no model: {answer[:200]!r}")
    return found[1].decode()


async def at_once(requests: Iterable[Awaitable[object]], seconds: float = SECONDS) -> None:
    """Wait until all requests have ended, for at most `seconds`, and cancel the rest."""
    tasks = [asyncio.ensure_future(each) for each in requests]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def again(make: Callable[[], Awaitable[object]], seconds: float = SECONDS) -> None:
    """Call `make` and await its result, again and again for `seconds`."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        await make()
