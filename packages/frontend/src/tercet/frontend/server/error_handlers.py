"""Handlers of the errors that endpoints and the router raise: answers in the format of the client's API."""

import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.database import StoreError
from tercet.frontend.errors import (
    ApiError,
    BadRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    RateLimitError,
    ServerError,
)
from tercet.frontend.http.auth import caller_of
from tercet.frontend.http.error_format import error_response
from tercet.frontend.http.refusal_pace import RefusalPace
from tercet.frontend.http.request_id import request_id_of
from tercet.frontend.http.sse import ClientDisconnectedError
from tercet.frontend.server.connection_limit import max_connections

logger = logging.getLogger(__name__)


def add_error_handlers(app: FastAPI) -> None:
    app.state.refusal_pace = RefusalPace(max_connections() // 4)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnectedError, _on_client_gone)
    app.add_exception_handler(StoreError, _on_store_error)
    app.add_exception_handler(Exception, _on_exception)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    if isinstance(error, RateLimitError):
        pace = request.app.state.refusal_pace
        assert isinstance(pace, RefusalPace)
        await pace.wait(caller_of(request).owner)
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


def _is_absent(method: str, path: str) -> bool:
    """Return whether a route is one of OpenAI's that this server lacks, though it has others at the path."""
    return (method == "DELETE" and path.startswith("/v1/models/")) or (
        (method, path) == ("POST", "/v1/responses/compact")
    )


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Convert an error of the router into the API's format."""
    assert isinstance(error, HTTPException)
    scope = request.scope
    path = scope["path"]  # `request.url` includes the Host header, which may hold anything
    status = 404 if _is_absent(request.method, path) else error.status_code
    match status:
        case 404:
            return error_response(NotFoundError(f"Unknown request URL: {request.method} {path}."), scope)
        case 405:
            response = error_response(MethodNotAllowedError(f"{request.method} is not allowed for {path}."), scope)
            response.headers.update(error.headers or {})
            return response
        case 413:
            return error_response(PayloadTooLargeError("The body is too long."), scope)
    return error_response(BadRequestError("The request cannot be read."), scope)
