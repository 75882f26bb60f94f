"""The end of a request is independent of its headers and offers."""

import asyncio
from collections.abc import Callable

import pytest

from tercet.frontend.testing import FakeEngine, serving

EngineOf = Callable[..., FakeEngine]

POST = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LAST = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
BODY = b'{"prompt": "GET /nowhere HTTP/1.1\\r\\n\\r\\n"}'


async def talk(url: str, *pieces: bytes) -> bytes:
    """Send pieces, and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    for piece in pieces:
        writer.write(piece)
        await asyncio.sleep(0.02)
    async with asyncio.timeout(10):
        answer = await reader.read()
    writer.close()
    return answer


OFFER = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"


async def test_many_offers_in_one_piece_are_answered(engine_of: EngineOf) -> None:
    async with serving(engine_of()) as served:
        answer = await talk(served.url, OFFER * 32 + LAST)
    assert answer.count(b"HTTP/1.1 200") == 33


@pytest.mark.parametrize("ask", [OFFER, LAST.replace(b"close", b"keep-alive")], ids=["offers", "plain"])
async def test_thousands_of_requests_in_one_piece_end_the_connection(engine_of: EngineOf, ask: bytes) -> None:
    """Pipelined requests are parsed before the first one is answered, which blocks the loop."""
    async with serving(engine_of()) as served:
        try:
            answer = await talk(served.url, ask * 3000 + LAST)
        except ConnectionResetError:
            answer = b""
        assert answer.count(b"HTTP/1.1 200") <= 33
        assert (await talk(served.url, LAST)).count(b"HTTP/1.1 200") == 1


CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "framing",
    [
        b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n" + CHUNKED,
        b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n" + CHUNKED,
        b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + BODY,
        b"content-length: +5\r\n\r\n" + BODY,
        b"content-length: 5, 5\r\n\r\n" + BODY,
        b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
        b"transfer-encoding: xchunked\r\n\r\n" + CHUNKED,
        b"transfer-encoding: chunked, identity\r\n\r\n" + CHUNKED,
        b"transfer-encoding : chunked\r\n\r\n" + CHUNKED,
        b"transfer-encoding:\x0bchunked\r\n\r\n" + CHUNKED,
        b"x-a: 1\r\n b: 2\r\ncontent-length: 5\r\n\r\n" + BODY,
        b"transfer-encoding: chunked\r\n\r\n" + CHUNKED.replace(b"\r\n", b"\n"),
        b"content-length: %d\n\n" % len(BODY) + BODY,
        b"x-a: 1\rx-b: 2\r\n\r\n",
        b"x-a: \0\r\n\r\n",
    ],
)
async def test_what_a_proxy_may_read_otherwise_is_refused(engine_of: EngineOf, framing: bytes) -> None:
    """Forms of request smuggling, whose end a proxy may see elsewhere."""
    async with serving(engine_of()) as served:
        answer = await talk(served.url, POST + framing, LAST)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400")
