"""The HTTP application: routes, error handlers and middleware."""

import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.database import StoreError
from tercet.frontend.errors import (
    ApiError,
    BadRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    ServerError,
)
from tercet.frontend.http.auth import Keys
from tercet.frontend.http.backpressure import response_budget
from tercet.frontend.http.loop_turns import LoopTurns
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.http.request_id import request_id_of
from tercet.frontend.http.sse import ClientDisconnectedError
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.server.allowed_hosts import AllowedHosts
from tercet.frontend.server.middleware import METRICS, OPEN_ROUTES, ROUTE, RequestMiddleware, error_response
from tercet.frontend.server.routes import Endpoint, routes
from tercet.frontend.server.stores import Stores

logger = logging.getLogger(__name__)

_EXPOSED_HEADERS = ("x-request-id", "request-id", "retry-after")
"""Response headers that pages of another origin may read, in addition to the CORS-safelisted ones."""


def build_app(
    manager: TokenizerManager,
    config: HttpConfig,
    serving: ServingConfig = ServingConfig(),
    stores: Stores | None = None,
    *,
    local: bool = False,
) -> ASGIApp:
    """Return the application. Endpoints read and write their own bytes; FastAPI only routes.

    `local`: the server is reachable from this machine only.

    Raises ValueError for invalid options.
    """
    app = FastAPI(
        title="Tercet",
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "operation_spans": False,
            "auto_configure": False,
        },
        openapi_url=None,
        redirect_slashes=False,
    )
    for method, path, endpoint in routes(manager, config, serving, stores):
        app.add_route(path, _with_route(path, endpoint), methods=[method])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnectedError, _on_client_gone)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(Exception, _on_exception)
    open_routes = OPEN_ROUTES | ({METRICS} if config.open_metrics else set())
    api_keys = config.api_keys()
    app.state.body_budget = MemoryBudget(config.max_body_bytes)
    app.state.loop_turns = LoopTurns()
    hosts = AllowedHosts(config.allowed_origin) if local and not api_keys else None
    guarded = RequestMiddleware(
        app,
        Keys(api_keys, config.admin_key),
        lambda: manager.draining,
        manager.counters.exchanges,
        open_routes,
        response_budget(config.max_body_bytes),
        hosts,
    )
    if not config.allowed_origin:
        return guarded
    # Browsers send a preflight request without a key. It must be answered before keys are checked.
    return CORSMiddleware(
        guarded, config.allowed_origin, allow_methods=["*"], allow_headers=["*"], expose_headers=_EXPOSED_HEADERS
    )


def _with_route(path: str, endpoint: Endpoint) -> Endpoint:
    """Return the endpoint, wrapped to store its route in the scope for `RequestMiddleware`."""

    async def respond(request: Request) -> Response:
        request.scope[ROUTE] = path
        return await endpoint(request)

    return respond


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.scope)


async def _on_exception(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """Answer an unexpected exception, which `RequestMiddleware` logs, without its details."""
    return error_response(ServerError("The server failed this request."), request.scope)


async def _on_store_error(request: Request, error: Exception) -> Response:
    """Answer with the error of the store, because the same request without `store` would succeed."""
    logger.error("response store failed: request_id=%s error=%s", request_id_of(request.scope), error)
    return error_response(ServerError(str(error)), request.scope)


async def _on_client_gone(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=499)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Convert an error of the router into the API's format."""
    assert isinstance(error, HTTPException)
    scope = request.scope
    path = scope["path"]  # `request.url` includes the Host header, which may hold anything
    match error.status_code:
        case 404:
            return error_response(NotFoundError(f"Unknown request URL: {request.method} {path}."), scope)
        case 405:
            response = error_response(MethodNotAllowedError(f"{request.method} is not allowed for {path}."), scope)
            response.headers.update(error.headers or {})
            return response
        case 413:
            return error_response(PayloadTooLargeError("The body is too long."), scope)
    return error_response(BadRequestError("The request cannot be read."), scope)
