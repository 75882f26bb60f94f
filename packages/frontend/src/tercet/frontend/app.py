"""The HTTP application: every route, and what surrounds them."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tercet.frontend.access import METRICS, OPEN_ROUTES, Access, error_response
from tercet.frontend.anthropic.routes import AnthropicServingMessages
from tercet.frontend.config import HttpConfig, ServingConfig
from tercet.frontend.control_routes import ControlRoutes
from tercet.frontend.errors import (
    ApiError,
    BadRequestError,
    MethodNotAllowedError,
    NotFoundError,
    PayloadTooLargeError,
    ServerError,
)
from tercet.frontend.event_stream import ClientGoneError
from tercet.frontend.kept import Kept
from tercet.frontend.keys import Keys
from tercet.frontend.metrics import Metrics
from tercet.frontend.native import Native
from tercet.frontend.openai.chat import OpenAIServingChat
from tercet.frontend.openai.completions import OpenAIServingCompletion
from tercet.frontend.openai.embeddings import OpenAIServingEmbedding
from tercet.frontend.openai.models import OpenAIServingModels
from tercet.frontend.openai.rerank import OpenAIServingRerank
from tercet.frontend.openapi import OpenApi
from tercet.frontend.operations import OPERATIONS
from tercet.frontend.responses.routes import OpenAIServingResponses
from tercet.frontend.sessions.routes import Sessions
from tercet.frontend.tokenizer_manager import TokenizerManager
from tercet.frontend.turn.plan import TurnPlanner

Endpoint = Callable[[Request], Awaitable[Response]]


def build_app(
    manager: TokenizerManager, config: HttpConfig, serving: ServingConfig = ServingConfig(), kept: Kept | None = None
) -> ASGIApp:
    """The application. Its routes read and write their own bytes; FastAPI routes and no more.

    Raises ValueError for options that cannot work.
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
    planner = TurnPlanner(serving)
    chat = OpenAIServingChat(manager, config.max_body_bytes, planner)
    models = OpenAIServingModels(manager.models)
    sessions = Sessions(kept.sessions if kept else None, config.max_body_bytes)
    native = Native(manager, sessions, config.max_body_bytes)
    control = ControlRoutes(manager, config.max_body_bytes)
    messages = AnthropicServingMessages(manager, planner, config.max_body_bytes)
    responses = OpenAIServingResponses(manager, planner, kept, config.max_body_bytes)
    embedding = OpenAIServingEmbedding(manager, config.max_body_bytes)
    rerank = OpenAIServingRerank(manager, config.max_body_bytes)
    routes: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/chat/completions", chat.create),
        ("POST", "/v1/completions", OpenAIServingCompletion(manager, config.max_body_bytes).create),
        ("POST", "/v1/responses", responses.create),
        ("POST", "/v1/responses/input_tokens", responses.input_tokens),
        ("GET", "/v1/responses/{response_id}", responses.retrieve),
        ("DELETE", "/v1/responses/{response_id}", responses.delete),
        ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", responses.input_items),
        ("POST", "/v1/embeddings", embedding.create),
        ("POST", "/v1/classify", embedding.classify),
        ("POST", "/v1/rerank", rerank.rerank),
        ("POST", "/v1/score", rerank.score),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{model:path}", models.retrieve),
        ("POST", "/v1/messages", messages.create),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens),
        ("POST", "/generate", native.generate),
        ("POST", "/open_session", sessions.open),
        ("POST", "/close_session", sessions.close),
        ("POST", "/tokenize", native.tokenize),
        ("POST", "/detokenize", native.detokenize),
        ("POST", "/abort_request", control.abort_request),
        ("POST", "/flush_cache", control.flush_cache),
        ("POST", "/pause_generation", control.pause_generation),
        ("POST", "/continue_generation", control.continue_generation),
        ("GET", "/server_info", native.server_info),
        ("GET", "/health", native.health),
        ("GET", "/live", native.live),
        ("GET", METRICS, Metrics(manager).scrape),
        ("GET", "/openapi.json", OpenApi(OPERATIONS).read),
    ]
    for method, path, endpoint in routes:
        app.add_route(path, endpoint, methods=[method])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(Exception, _on_failure)
    open_routes = OPEN_ROUTES | ({METRICS} if config.open_metrics else set())
    return Access(app, Keys(config.api_keys(), config.admin_key), lambda: manager.draining, open_routes)


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _on_failure(request: Request, error: Exception) -> Response:  # noqa: ARG001
    """A fault of ours, which `Access` logs; its words stay inside."""
    return error_response(ServerError("The server failed this request."), request.url.path)


async def _on_client_gone(request: Request, error: Exception) -> Response:  # noqa: ARG001
    return Response(status_code=499)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    match error.status_code:
        case 404:
            return error_response(NotFoundError(f"Unknown request URL: {request.method} {path}."), path)
        case 405:
            response = error_response(MethodNotAllowedError(f"{request.method} is not allowed for {path}."), path)
            response.headers.update(error.headers or {})
            return response
        case 413:
            return error_response(PayloadTooLargeError("The body is too long."), path)
    return error_response(BadRequestError("The request cannot be read."), path)
