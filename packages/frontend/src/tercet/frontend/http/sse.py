"""Server-sent events, and work that is cancelled when the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Never, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")

DONE = b"data: [DONE]\n\n"

Write = Callable[[bytes], bool]
"""Writes a piece of a body at once. Returns False, having written nothing, if the client is slow or gone."""
WRITE = "tercet.write"
"""Key of the scope for the server's own `Write`, which bypasses all middleware."""


class ClientDisconnectedError(Exception):
    """The client has closed its connection, so there is nowhere to send a response."""


async def _disconnected(receive: Receive) -> Never:
    """Wait until the client disconnects, and raise ClientDisconnectedError."""
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnectedError


async def first_of(*works: Awaitable[_T]) -> _T:
    """Return the result of the first work to end, or raise its error, and cancel the others.

    Of works that end at once, the first one counts.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def cancel_on_disconnect(request: Request, work: Awaitable[_T]) -> _T:
    """Return the result of `work`, which is cancelled if the client disconnects. Read the body before.

    Raises ClientDisconnectedError.
    """
    return await first_of(work, _disconnected(request.receive))


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    """Return an event with a name, for APIs that name their events."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def _write_nothing(_: bytes) -> bool:
    """Write nothing: the default `Write` for a server without one."""
    return False


class EventStream(Response):
    """Streaming response with `body`; `on_close` runs exactly once when the connection ends.

    If the server has a `WRITE`, chunks go through it and skip the middleware, which would do nothing with them and cost
    more than the chunk itself.
    """

    media_type = "text/event-stream"

    def __init__(self, body: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        self._body = body
        self._on_close = on_close
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the body ends or the client disconnects."""
        sending = asyncio.ensure_future(self._send(send, scope.get(WRITE, _write_nothing)))
        disconnected = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({sending, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._on_close()
            for each in (sending, disconnected):
                each.cancel()
            await asyncio.gather(sending, disconnected, return_exceptions=True)

    async def _send(self, send: Send, write: Write) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._body:
            if data and not write(data):
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
