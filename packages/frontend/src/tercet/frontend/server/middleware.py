"""Middleware around all routes: request ids, API keys and error bodies.

Every route needs a key unless listed as open.
"""

import logging
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tercet.frontend.errors import ApiError, ServerError, UnauthorizedError
from tercet.frontend.http.auth import Caller, Keys, remember, shows_key
from tercet.frontend.http.backpressure import BackpressuredSend
from tercet.frontend.http.error_format import anthropic_error, asks_anthropic
from tercet.frontend.http.memory_budget import MemoryBudget, until_request_ends
from tercet.frontend.http.request_id import identify, request_id_of
from tercet.frontend.http.sse import ClientGoneError
from tercet.frontend.manager.counters import Exchange
from tercet.frontend.server.allowed_hosts import AllowedHosts

logger = logging.getLogger(__name__)

OPEN_ROUTES = frozenset({"/health", "/live"})
METRICS = "/metrics"
ROUTE = "tercet.route"
"""Key of the scope for the path of the matched route, as the router writes it."""
_OTHER = "other"
_NO_KEY = "No API key provided: send it as 'Authorization: Bearer KEY'."
_WRONG_KEY = "Incorrect API key provided."


class RequestMiddleware:
    """ASGI middleware around the whole application. Counts responses in `exchanges`.

    Without `hosts` any Host header is accepted. Unread responses use the memory budget `answers`.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        leaving: Callable[[], bool],
        exchanges: Counter[Exchange],
        open_routes: frozenset[str],
        answers: MemoryBudget,
        hosts: AllowedHosts | None = None,
    ) -> None:
        self.app = app
        self._keys = keys
        self._leaving = leaving
        self._exchanges = exchanges
        self._open_routes = open_routes
        self._answers = answers
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route accepts a websocket
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        request_id = identify(scope, headers)
        started = ended = False

        async def send_with_id(message: Message) -> None:
            nonlocal started, ended
            if message["type"] == "http.response.start":
                started = True
                self._exchanges[_exchange(scope, message["status"])] += 1
                answer = MutableHeaders(scope=message)
                answer["x-request-id"] = request_id
                if asks_anthropic(scope):
                    answer["request-id"] = request_id
                if self._leaving():
                    answer["connection"] = "close"
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
            await send(message)

        try:
            with until_request_ends():
                await self._answer(self._admit(scope, headers), scope, receive, send_with_id)
        except ClientGoneError:
            return
        except ApiError as error:
            await error_response(error, scope)(scope, receive, send_with_id)
        except Exception:
            logger.exception("request %s failed", request_id)
            if not started:
                failure = ServerError("The server failed this request.")
                await error_response(failure, scope)(scope, receive, send_with_id)
            elif not ended:
                raise

    async def _answer(self, visitor: Caller | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer with backpressure. Raises UnavailableError if too many responses are unread."""
        with self._answers.space(visitor.owner if visitor is not None else "") as space:
            paced = BackpressuredSend(send, space)
            await self.app(scope, receive, paced)
        if paced.refusal is not None:
            raise paced.refusal

    def _admit(self, scope: Scope, headers: Headers) -> Caller | None:
        """Return the caller of an admitted request, None for a caller without a key on an open route.

        Raises ApiError.
        """
        visitor = self._keys.visitor(headers)
        if scope["path"] not in self._open_routes:
            if visitor is None:
                raise UnauthorizedError(_WRONG_KEY if shows_key(headers) else _NO_KEY)
            if self._hosts is not None:
                self._hosts.check(headers)
        if visitor is not None:
            remember(scope, visitor)
        return visitor


def _exchange(scope: Scope, status: int) -> Exchange:
    """Return the counter key of a response.

    Requests without a route share one key, because clients choose their paths.
    """
    route = scope.get(ROUTE)
    return Exchange(scope["method"], route, status) if route else Exchange(_OTHER, _OTHER, status)


def error_response(error: ApiError, scope: Scope) -> Response:
    """Return the response for an error, in the format of the client's API."""
    body = anthropic_error(error, request_id_of(scope)) if asks_anthropic(scope) else error.body()
    return Response(body, error.status, error.headers(), media_type="application/json")
