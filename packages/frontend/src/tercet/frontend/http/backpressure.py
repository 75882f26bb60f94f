"""Backpressure for responses: bodies are written as fast as clients read, within a memory budget."""

from starlette.datastructures import Headers
from starlette.types import Message, Send

from tercet.frontend.errors import UnavailableError
from tercet.frontend.http.memory_budget import MemoryBudget, Reservation

_PIECE_BYTES = 65_536
"""Bytes that are written before the next wait for the client."""
_LONG_RESPONSE_BYTES = 32 * 1024 * 1024
"""Size of a long response in bytes; the budget holds 16 of them."""


def response_budget(longest_body: int) -> MemoryBudget:
    """Return the budget for unread responses: at least as large as the one for bodies, which some responses repeat."""
    return MemoryBudget(max(longest_body, _LONG_RESPONSE_BYTES))


class BackpressuredSend:
    """ASGI `send` for one response.

    A response of known length reserves memory until its client has read all but the last piece. Streams have no length;
    they wait for their client with each event.
    """

    def __init__(self, send: Send, reservation: Reservation) -> None:
        self._send = send
        self._reservation = reservation
        self._has_length = False
        self.refusal: UnavailableError | None = None
        """Error to send instead if the reservation failed. Nothing was sent before it."""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start(Headers(raw=message["headers"]).get("content-length"))
        if self.refusal is not None:
            return
        if self._has_length and "body" in message:
            await self._send_pieces(message)
        else:
            await self._send(message)

    def _start(self, length: str | None) -> None:
        self._has_length = length is not None
        try:
            self._reservation.reserve_length(int(length or 0))
        except UnavailableError:
            self.refusal = UnavailableError("Too many long answers wait to be read.", code="overloaded", retry_after=1)

    async def _send_pieces(self, message: Message) -> None:
        body, more_body = message["body"], message.get("more_body", False)
        for start in range(0, max(len(body), 1), _PIECE_BYTES):
            end = start + _PIECE_BYTES
            piece = body if len(body) <= _PIECE_BYTES else body[start:end]
            await self._send({"type": message["type"], "body": piece, "more_body": more_body or end < len(body)})
