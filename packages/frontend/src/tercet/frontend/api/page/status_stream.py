"""The /status/stream endpoint: the status of all parts, twice a second, as server-sent events."""

from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.route import Route
from tercet.frontend.http.sse import EventStream, event
from tercet.frontend.manager.status_feed import View
from tercet.frontend.manager.tokenizer_manager import TokenizerManager


class StatusStream:
    """Endpoint of the live view. A server that drains ends its streams, which would delay its end."""

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    @property
    def routes(self) -> list[Route]:
        return [Route("GET", "/status/stream", self.stream)]

    async def stream(self, request: Request) -> Response:
        """Return the stream of frames that the caller may see. Raises RateLimitError for too many viewers."""
        caller, status = caller_of(request), self._manager.status
        view = status.view_of(caller)
        status.join(caller)
        return EventStream(self._frames(view), lambda: status.leave(caller))

    async def _frames(self, view: View) -> AsyncIterator[bytes]:
        async for frame in self._manager.status.frames(view):
            yield event(frame)
            if self._manager.draining:
                return
