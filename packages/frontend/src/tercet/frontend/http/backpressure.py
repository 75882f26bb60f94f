"""Answers that are written as they are read, and take no more memory than they may together."""

from starlette.datastructures import Headers
from starlette.types import Message, Send

from tercet.frontend.errors import UnavailableError
from tercet.frontend.http.memory_budget import MemoryBudget, Space

_PIECE = 65_536
"""Bytes that are written before a client is waited for."""
_LONG = 32 * 1024 * 1024
"""Bytes of an answer of which there is room for 16: few are longer."""


def room_for_answers(longest_body: int) -> MemoryBudget:
    """Room for what has not been read yet of answers: as much as for bodies, which some of them repeat, or more."""
    return MemoryBudget(max(longest_body, _LONG))


class BackpressuredSend:
    """Sends one answer. One whose length is known takes space until its client has read it, but for the last of it.

    Streams know none, and wait for their client with each event.
    """

    def __init__(self, send: Send, space: Space) -> None:
        self._send = send
        self._space = space
        self._whole = False
        self.refusal: UnavailableError | None = None
        """What to say instead where there was no space: nothing was sent then."""

    async def __call__(self, message: Message) -> None:
        """Send a message of ASGI's."""
        if message["type"] == "http.response.start":
            self._begin(Headers(raw=message["headers"]).get("content-length"))
        if self.refusal is not None:
            return
        if self._whole and "body" in message:
            await self._send_pieces(message)
        else:
            await self._send(message)

    def _begin(self, length: str | None) -> None:
        self._whole = length is not None
        try:
            self._space.fill(int(length or 0))
        except UnavailableError:
            self.refusal = UnavailableError("Too many long answers wait to be read.", code="overloaded", retry_after=1)

    async def _send_pieces(self, message: Message) -> None:
        body, more = message["body"], message.get("more_body", False)
        for start in range(0, max(len(body), 1), _PIECE):
            end = start + _PIECE
            piece = body if len(body) <= _PIECE else body[start:end]
            await self._send({"type": message["type"], "body": piece, "more_body": more or end < len(body)})
