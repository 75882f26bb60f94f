"""Limits of request heads, and orderly shutdown."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime

import httpx2
import pytest

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.server.protocol import HttpLimits
from tercet.frontend.testing import FakeEngine, Served, Token, serving

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]


async def talk(served: Served, *pieces: bytes) -> bytes:
    """Send pieces, and read until the server closes the connection."""
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("whole", [True, False])
async def test_a_request_head_that_is_too_long_is_refused(engine_of: EngineOf, whole: bool) -> None:
    head = b"GET /live HTTP/1.1\r\nhost: x\r\nx-long: "
    async with serving(engine_of(), HttpConfig(max_header_bytes=4096)) as served:
        if whole:
            answer = await talk(served, head + b"a" * 5000 + b"\r\nconnection: close\r\n\r\n")
        else:
            answer = await talk(served, head, *[b"a" * 1000] * 6)
        fine = await talk(served, head + b"a" * 1000 + b"\r\nconnection: close\r\n\r\n")
    assert answer == b"" or refused(answer) == (431, "request_headers_too_long")
    assert fine.startswith(b"HTTP/1.1 200")


def refused(answer: bytes) -> tuple[int, str | None]:
    """Return the status and the code of an error that ends its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert b"\r\ncontent-type: application/json" in head
    assert b"\r\nx-request-id: req_" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


async def test_a_head_of_many_empty_headers_is_too_long(engine_of: EngineOf) -> None:
    head = b"GET /live HTTP/1.1\r\nhost: x\r\n"
    async with serving(engine_of(), HttpConfig(max_header_bytes=4096)) as served:
        answer = await talk(served, head + b"a:\r\n" * 200 + b"connection: close\r\n\r\n")
        fine = await talk(served, head + b"a:\r\n" * 100 + b"connection: close\r\n\r\n")
    assert answer == b"" or refused(answer) == (431, "request_headers_too_long")
    assert fine.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(("chunk", "taken"), [(1, False), (64, True)])
async def test_a_body_of_countless_small_chunks_is_refused(engine_of: EngineOf, chunk: int, taken: bool) -> None:
    """A small chunk costs as much as a large one."""
    body = json.dumps({"prompt": "a" * 5000 * chunk}).encode()
    chunks = [body[start : start + chunk] for start in range(0, len(body), chunk)]
    sent = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n\r\n"
    head = CHUNKED.partition(b"\r\n\r\n")[0] + b"\r\nconnection: close\r\n\r\n"
    async with serving(engine_of()) as served:
        answer = await talk(served, head + sent)
    if taken:
        assert answer.startswith(b"HTTP/1.1 200")
    else:
        assert answer == b"" or refused(answer) == (400, None)


async def test_what_is_no_request_is_refused_as_json(engine_of: EngineOf) -> None:
    async with serving(engine_of()) as served:
        assert refused(await talk(served, b"nonsense\r\n\r\n")) == (400, None)


async def test_nonsense_is_logged_within_bounds(engine_of: EngineOf, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(engine_of()) as served:
        for _ in range(40):
            await talk(served, b"nonsense\r\n\r\n")
    assert 1 <= sum("nvalid HTTP" in record.getMessage() for record in caplog.records) <= 10


CHUNKED = (
    b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    b'f\r\n{"prompt": "a"}\r\n'
)


@pytest.mark.parametrize(
    "flood",
    [
        pytest.param([b"0\r\n", *[b"x-trailer: " + b"a" * 1000 + b"\r\n"] * 6], id="trailers"),
        pytest.param([b"0\r\nx-trailer: ", *[b"a" * 1000] * 6], id="a trailer"),
        pytest.param([b"1;", *[b"a" * 1000] * 6], id="an extension"),
    ],
)
async def test_what_surrounds_a_body_is_no_longer_than_a_head(engine_of: EngineOf, flood: list[bytes]) -> None:
    async with serving(engine_of(), HttpConfig(max_header_bytes=4096)) as served:
        answer = await talk(served, CHUNKED, *flood)
    assert answer == b"" or refused(answer) == (431, "request_headers_too_long")


async def test_short_trailers_are_passed_over(engine_of: EngineOf) -> None:
    async with serving(engine_of(), HttpConfig(max_header_bytes=4096)) as served:
        answer = await talk(served, CHUNKED, b"0\r\nx-trailer: a\r\n\r\n", b"GET /live HTTP/1.0\r\n\r\n")
    assert answer.count(b"HTTP/1.1 200") == 2


async def test_a_refusal_does_not_stand_in_an_answer_to_another_request(engine_of: EngineOf) -> None:
    body = b'{"text": "hello"}'
    ask = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    async with serving(engine_of(auto=False)) as served:
        assert await talk(served, ask % (len(body), body), b"nonsense\r\n\r\n") == b""
        await served.until_idle()


COMPLETION = b'{"model": "tiny", "prompt": "hello"}'
OFFER = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    b"connection: upgrade\r\nupgrade: %b\r\n"
)
LAST = b"GET /live HTTP/1.0\r\n\r\n"


@pytest.mark.parametrize("offered", [b"h2c", b"websocket"])
@pytest.mark.parametrize("cut", [0, 1, 20, None])
@pytest.mark.parametrize("chunked", [False, True])
async def test_an_offer_to_change_the_protocol_is_a_header_like_any_other(
    engine_of: EngineOf, offered: bytes, cut: int | None, chunked: bool
) -> None:
    """Java's client offers HTTP/2 with every request. Its body used to be lost, or parsed as the next request."""
    size = len(COMPLETION)
    if chunked:
        head, body = b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (size, COMPLETION)
    else:
        head, body = b"content-length: %d\r\n\r\n" % size, COMPLETION
    whole = OFFER % offered + head + body + LAST
    at = len(whole) if cut is None else len(OFFER % offered + head) + cut
    async with serving(engine_of()) as served:
        answer = await talk(served, whole[:at], whole[at:])
    assert b"Hello world!" in answer
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.endswith(b'{"status":"ok"}')


async def test_what_is_within_a_body_is_no_request_whatever_is_offered(engine_of: EngineOf) -> None:
    body = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    async with serving(engine_of()) as served:
        answer = await talk(served, OFFER % b"h2c" + b"content-length: %d\r\n\r\n" % len(body), body, LAST)
    assert (answer.count(b"HTTP/1.1 400"), answer.count(b"HTTP/1.1 200")) == (1, 1)
    assert b"max_model_len" not in answer


async def test_a_request_without_a_body_may_offer_too(engine_of: EngineOf) -> None:
    ask = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with serving(engine_of()) as served:
        answer = await talk(served, ask, ask + LAST)
    assert answer.count(b"HTTP/1.1 200") == 3


async def test_a_head_that_begins_behind_a_long_body_is_counted_by_itself(engine_of: EngineOf) -> None:
    body = json.dumps({"prompt": "a" * 4000}).encode()
    ask = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    async with serving(engine_of(), HttpConfig(max_header_bytes=4096)) as served:
        last = b"GET /live HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        answer = await talk(served, ask % (len(body), body) + last[:40], last[40:])
    assert answer.count(b"HTTP/1.1 200") == 2


LIVE = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
UPLOAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n"


async def hung_up(served: Served, begun: bytes, *, first: bytes | None) -> bool:
    """Return whether the server closes a connection on which, after a request, an incomplete one begins."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
    try:
        if first is not None:
            writer.write(first)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 ")
        writer.write(begun)
        async with asyncio.timeout(5):
            return b"HTTP/" not in await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("first", [None, LIVE])
@pytest.mark.parametrize("begun", [b"G", LIVE[:-2], b"\r\n"])
async def test_a_head_that_does_not_end_is_not_waited_for(
    engine_of: EngineOf, first: bytes | None, begun: bytes
) -> None:
    """The first byte ends uvicorn's keep-alive timeout, so a timeout for the head must replace it."""
    async with serving(engine_of(), limits=HttpLimits(head_seconds=0.05)) as served:
        assert await hung_up(served, begun, first=first)


async def test_a_body_that_was_refused_is_not_waited_for(engine_of: EngineOf) -> None:
    async with serving(engine_of(), limits=HttpLimits(head_seconds=0.05)) as served:
        assert await hung_up(served, b"x", first=UPLOAD + b"x")


async def test_only_heads_are_hurried(engine_of: EngineOf) -> None:
    """Idle connections stay open, and so does a response while a further head is incomplete."""
    body = b'{"text": "hello"}'
    ask = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    engine = engine_of(lambda _request, _index: [Token(5, "x")], auto=False)
    async with serving(engine, limits=HttpLimits(head_seconds=0.05)) as served, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]))
        writer.write(LIVE)
        await reader.readuntil(b"}")
        await asyncio.sleep(0.15)
        writer.write(ask % (len(body), body) + LIVE[:3])
        while not engine.running:  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.15)
        engine.step()
        answer = await reader.readuntil(b"}}")
        writer.write(LIVE[3:])
        assert b'"ok"' in await reader.readuntil(b"}")
        writer.close()
    assert b'"text":"x"' in answer


async def test_a_long_body_is_not_taken_for_a_head(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of(), HttpConfig(max_header_bytes=4096)) as served:
        for _ in range(2):
            answer = await http_of(served).post("/tokenize", json={"prompt": "the quick " * 1000})
            assert answer.status_code == 200


async def test_garbage_ends_one_connection(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        await talk(served, b"\x00\xff\x13 nonsense\r\n\r\n")
        assert (await http_of(served).get("/live")).status_code == 200


async def test_a_request_in_flight_may_finish_after_stop(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(lambda _request, _index: [Token(5, "x"), Token(6, "y")], auto=False)
    async with serving(engine) as served:
        asked = asyncio.create_task(http_of(served).post("/generate", json={"text": "hello"}))
        async with asyncio.timeout(10):
            while not engine.running:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.002)
        for delay in (0.05, 0.06):
            asyncio.get_running_loop().call_later(delay, engine.step)
    assert (await asked).json()["text"] == "xy"


async def test_answers_tell_the_date_as_it_is(engine_of: EngineOf, http_of: HttpOf) -> None:
    async with serving(engine_of()) as served:
        async with asyncio.timeout(10):
            dates = set[str]()
            while len(dates) < 2:
                answer = await http_of(served).get("/live")
                dates.add(answer.headers["date"])
                assert abs(parsedate_to_datetime(answer.headers["date"]).timestamp() - time.time()) < 3
                await asyncio.sleep(0.05)


async def test_a_client_that_reads_late_gets_everything(engine_of: EngineOf) -> None:
    """The response exceeds the sockets' buffers, and has tokens without text in between."""
    texts = [chr(97 + place % 26) * 200_000 if place % 3 else "" for place in range(60)]
    engine = engine_of(lambda _request, _index: [Token(5, text) for text in texts], auto=False)
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "stream": True}
    body = json.dumps(asked).encode()
    async with serving(engine) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        async with asyncio.timeout(30):
            while not engine.running:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.002)
            while engine.running:  # written as far as the sockets have room; the rest waits
                engine.step()
                await asyncio.sleep(0.002)
            answer = await reader.read()
        writer.close()
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer.count(b"\r\n0\r\n") == 1, "an empty piece would have ended the body"
    lines = [event.partition(b"\n\n")[0] for event in answer.split(b"data: ")[1:-1]]
    content = [json.loads(event)["choices"][0]["delta"].get("content") for event in lines]
    assert "".join(filter(None, content)) == "".join(texts)


def long_answer(*, stream: bool) -> tuple[Callable[[object, int], list[Token]], bytes]:
    """Return a script that exceeds the sockets' buffers, and the request for it."""
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "stream": stream}
    body = json.dumps(asked).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
    return lambda _request, _index: [Token(5, "x" * 200_000)] * 60, head % len(
        body
    ) + b"connection: close\r\n\r\n" + body


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_gone(engine_of: EngineOf, stream: bool) -> None:
    script, ask = long_answer(stream=stream)
    async with serving(engine_of(script), limits=HttpLimits(read_seconds=0.1)) as served, asyncio.timeout(20):
        _, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rpartition(":")[2]), limit=1024)
        writer.write(ask)
        while not served.engine.requests():  # noqa: ASYNC110 - the fake has no event for it
            await asyncio.sleep(0.002)
        await served.until_idle()
        while served.server.server_state.connections:  # noqa: ASYNC110 - nor has the server
            await asyncio.sleep(0.01)
        writer.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_reads_slowly_is_waited_for(engine_of: EngineOf, stream: bool) -> None:
    script, ask = long_answer(stream=stream)
    async with serving(engine_of(script), limits=HttpLimits(read_seconds=1.0)) as served, asyncio.timeout(60):
        # The system reads more only when a third of its buffer is free, which would otherwise be megabytes.
        served.server._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        client.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
        reader, writer = await asyncio.open_connection(sock=client, limit=1024)
        writer.write(ask)
        length = 0
        while piece := await reader.read(50_000):
            length += len(piece)
            await asyncio.sleep(0.01)
        writer.close()
    assert length > 60 * 200_000
