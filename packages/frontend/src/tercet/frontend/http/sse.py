"""Answers that end when their client does: server-sent events, and work that nobody waits for any more."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"

Write = Callable[[bytes], bool]
"""Sends a piece of a body at once. False, and nothing sent, when the client has to be waited for, or is gone."""
WRITE = "tercet.write"
"""Where the scope holds the server's own, below every middleware."""


class ClientGoneError(Exception):
    """The client closed its connection: there is nobody to answer."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client leaves. Call it once the body has been read.

    Raises ClientGoneError.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def event(data: bytes) -> bytes:
    """One event."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """One event of an API whose events have names."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _never(_: bytes) -> bool:
    """The `Write` of a server that has none."""
    return False


class EventStream(Response):
    """Streams `body`; `on_close` runs exactly once, however the connection ends.

    Where the server has a `WRITE`, chunks are written by it, past the middleware: that does nothing with them, and
    would cost more for each than the chunk itself.
    """

    media_type = "text/event-stream"

    def __init__(self, body: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        self._body = body
        self._on_close = on_close
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the body ends or the client leaves."""
        sending = asyncio.ensure_future(self._send(send, scope.get(WRITE, _never)))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._on_close()
            for each in (sending, gone):
                each.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, send: Send, write: Write) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._body:
            if data and not write(data):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
