"""Middleware around all routes: request ids, API keys and error bodies.

Every route needs a key unless listed as open.
"""

import logging
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.frontend.errors import ApiError, ServerError, UnauthorizedError
from tercet.frontend.http.auth import Caller, Keys, has_key, set_caller
from tercet.frontend.http.backpressure import BackpressuredSend
from tercet.frontend.http.error_format import ROUTE, error_response, uses_anthropic_format
from tercet.frontend.http.loop_turns import LoopPlaces
from tercet.frontend.http.memory_budget import MemoryBudget, hold_reservations
from tercet.frontend.http.request_id import assign_request_id
from tercet.frontend.http.sse import ClientDisconnectedError
from tercet.frontend.manager.counters import Exchange
from tercet.frontend.server.allowed_hosts import AllowedHosts

logger = logging.getLogger(__name__)

OPEN_ROUTES = frozenset({"/health", "/live"})
_OTHER = "other"
_NO_KEY = "No API key provided: send it as 'Authorization: Bearer KEY'."
_WRONG_KEY = "Incorrect API key provided."


class RequestMiddleware:
    """ASGI middleware around the whole application. Counts responses in `exchanges`.

    Without `hosts` any Host header is accepted. Unread responses count against `budget`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        is_draining: Callable[[], bool],
        exchanges: Counter[Exchange],
        open_routes: frozenset[str],
        budget: MemoryBudget,
        hosts: AllowedHosts | None = None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._is_draining = is_draining
        self._exchanges = exchanges
        self._open_routes = open_routes
        self._budget = budget
        self._hosts = hosts
        self._starts = LoopPlaces()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route accepts a websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        request_id = assign_request_id(scope, headers)
        started = ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = True
                self._exchanges[_exchange(scope, message["status"])] += 1
                response_headers = MutableHeaders(scope=message)
                response_headers["x-request-id"] = request_id
                if uses_anthropic_format(scope):
                    response_headers["request-id"] = request_id
                if self._is_draining():
                    response_headers["connection"] = "close"
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        try:
            with hold_reservations():
                await self._respond(self._admit(scope, headers), scope, receive, send_with_id)
        except ClientDisconnectedError:
            return
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send_with_id)
        except Exception:
            logger.exception("http request failed: request_id=%s", request_id)
            if not started:
                failure = ServerError("The server failed this request.")
                await error_response(failure, scope)(scope, receive, send_with_id)
            elif not ended:
                raise

    async def _respond(self, caller: Caller | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer with backpressure. Raises UnavailableError if too many responses are unread."""
        owner = caller.owner if caller is not None else ""
        await self._starts.wait(owner)
        with self._budget.reserve(owner) as reservation:
            backpressured = BackpressuredSend(send, reservation)
            await self.app(scope, receive, backpressured)
        if backpressured.refusal is not None:
            raise backpressured.refusal

    def _admit(self, scope: Scope, headers: Headers) -> Caller | None:
        """Return the caller of an admitted request, None for a caller without a key on an open route.

        Raises ApiError.
        """
        caller = self._keys.authenticate(headers)
        if scope["path"] not in self._open_routes:
            if caller is None:
                raise UnauthorizedError(_WRONG_KEY if has_key(headers) else _NO_KEY)
            if self._hosts is not None:
                self._hosts.check(headers)
        if caller is not None:
            set_caller(scope, caller)
        return caller


def _exchange(scope: Scope, status: int) -> Exchange:
    """Return the counter key of a response.

    Requests without a route share one key, because clients choose their paths.
    """
    route = scope.get(ROUTE)
    return Exchange(scope["method"], route, status) if route else Exchange(_OTHER, _OTHER, status)
