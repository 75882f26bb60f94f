"""The HTTP application: routes and middleware."""

from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from tercet.frontend.api.anthropic.routes import AnthropicServingMessages
from tercet.frontend.api.docs.openapi import OpenApi
from tercet.frontend.api.docs.operations import OPERATIONS
from tercet.frontend.api.metrics import METRICS_PATH, Metrics
from tercet.frontend.api.models import OpenAIServingModels
from tercet.frontend.api.openai.audio.routes import OpenAIServingAudio
from tercet.frontend.api.openai.chat import OpenAIServingChat
from tercet.frontend.api.openai.completions import OpenAIServingCompletion
from tercet.frontend.api.openai.embeddings import OpenAIServingEmbedding
from tercet.frontend.api.openai.rerank import OpenAIServingRerank
from tercet.frontend.api.openai.stored.routes import OpenAIServingStoredChats
from tercet.frontend.api.page.files import PageFiles
from tercet.frontend.api.page.status_stream import StatusStream
from tercet.frontend.api.responses.conversation_routes import OpenAIServingConversations
from tercet.frontend.api.responses.routes import OpenAIServingResponses
from tercet.frontend.api.sglang.routes import sglang_routes
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.http.auth import Keys
from tercet.frontend.http.backpressure import response_budget
from tercet.frontend.http.error_format import ROUTE
from tercet.frontend.http.memory_budget import MemoryBudget
from tercet.frontend.http.route import Route
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.server.allowed_hosts import AllowedHosts
from tercet.frontend.server.error_handlers import add_error_handlers
from tercet.frontend.server.middleware import OPEN_ROUTES, RequestMiddleware
from tercet.frontend.server.stores import Stores

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
        telemetry=dict.fromkeys(("tracing", "metrics", "logs", "operation_spans", "auto_configure"), False),  # type: ignore[arg-type]
        openapi_url=None,
        redirect_slashes=False,
    )
    page = PageFiles() if config.page else None
    for route in [*_routes(manager, config, serving, stores), *(page.routes if page else ())]:
        app.add_route(route.path, _with_path(route), methods=[route.method])
    add_error_handlers(app)
    open_routes = OPEN_ROUTES | ({METRICS_PATH} if config.open_metrics else set()) | (page.paths if page else set())
    api_keys = config.api_keys()
    app.state.body_budget = MemoryBudget(config.max_body_bytes)
    app.state.loop_turns = manager.requests.turns
    hosts = AllowedHosts(config.allowed_origin) if local and not api_keys else None
    guarded = RequestMiddleware(
        app,
        Keys(api_keys, config.admin_key, open_admin=config.open_admin),
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
        guarded,
        config.allowed_origin,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=_EXPOSED_HEADERS,
        allow_private_network=True,
    )


def _routes(
    manager: TokenizerManager, config: HttpConfig, serving: ServingConfig, stores: Stores | None
) -> list[Route]:
    """Return the routes of all APIs. Raises ValueError for invalid options."""
    planner, limit = ChatPlanner(serving), config.max_body_bytes
    responses = stores.responses if stores else None
    conversations = stores.conversations if stores else None
    background = stores.background if stores else None
    chats = stores.chats if stores else None
    return [
        *OpenAIServingChat(manager, limit, planner, chats).routes,
        *OpenAIServingStoredChats(chats, limit).routes,
        *OpenAIServingCompletion(manager, limit).routes,
        *OpenAIServingResponses(manager, planner, responses, background, conversations, limit).routes,
        *OpenAIServingConversations(conversations, responses, limit).routes,
        *OpenAIServingEmbedding(manager, limit).routes,
        *OpenAIServingRerank(manager, limit).routes,
        *OpenAIServingAudio(manager, limit).routes,
        *OpenAIServingModels(manager.models, manager.adapters).routes,
        *AnthropicServingMessages(manager, planner, limit).routes,
        *sglang_routes(manager, planner, stores.sessions if stores else None, limit),
        *Metrics(manager).routes,
        *StatusStream(manager).routes,
        *OpenApi(OPERATIONS).routes,
    ]


def _with_path(route: Route) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint, wrapped to store its path in the scope for `RequestMiddleware`."""

    async def respond(request: Request) -> Response:
        request.scope[ROUTE] = route.path
        return await route.endpoint(request)

    return respond
