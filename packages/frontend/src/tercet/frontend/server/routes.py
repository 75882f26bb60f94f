"""The table of routes: method, path and endpoint."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from tercet.frontend.api.anthropic.routes import AnthropicServingMessages
from tercet.frontend.api.docs.openapi import OpenApi
from tercet.frontend.api.docs.operations import OPERATIONS
from tercet.frontend.api.metrics import Metrics
from tercet.frontend.api.models import OpenAIServingModels
from tercet.frontend.api.openai.chat import OpenAIServingChat
from tercet.frontend.api.openai.completions import OpenAIServingCompletion
from tercet.frontend.api.openai.embeddings import CLASSIFY_PATHS, OpenAIServingEmbedding
from tercet.frontend.api.openai.rerank import RERANK_PATHS, SCORE_PATHS, OpenAIServingRerank
from tercet.frontend.api.responses.conversation_routes import OpenAIServingConversations
from tercet.frontend.api.responses.routes import OpenAIServingResponses
from tercet.frontend.api.sglang.adapter_routes import LOAD_PATHS, UNLOAD_PATHS, AdapterRoutes
from tercet.frontend.api.sglang.control_routes import ControlRoutes
from tercet.frontend.api.sglang.generate import GenerateRoutes
from tercet.frontend.api.sglang.session_routes import SessionRoutes
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.config.config import HttpConfig, ServingConfig
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.server.middleware import METRICS
from tercet.frontend.server.stores import Stores

Endpoint = Callable[[Request], Awaitable[Response]]


Route = tuple[str, str, Endpoint]
"""Method, path and endpoint."""


def routes(manager: TokenizerManager, config: HttpConfig, serving: ServingConfig, stores: Stores | None) -> list[Route]:
    """Return the routes of one frontend. Raises ValueError for invalid options."""
    planner = ChatPlanner(serving)
    chat = OpenAIServingChat(manager, config.max_body_bytes, planner)
    models = OpenAIServingModels(manager.models, manager.adapters)
    sessions = SessionRoutes(stores.sessions if stores else None, config.max_body_bytes)
    generate = GenerateRoutes(manager, sessions, config.max_body_bytes, planner.reasoning_field)
    control = ControlRoutes(manager, config.max_body_bytes)
    adapters = AdapterRoutes(manager.adapters, config.max_body_bytes)
    messages = AnthropicServingMessages(manager, planner, config.max_body_bytes)
    embedding = OpenAIServingEmbedding(manager, config.max_body_bytes)
    rerank = OpenAIServingRerank(manager, config.max_body_bytes)
    return [
        ("POST", "/v1/chat/completions", chat.create),
        ("POST", "/v1/completions", OpenAIServingCompletion(manager, config.max_body_bytes).create),
        *_stored_routes(manager, planner, stores, config.max_body_bytes),
        ("POST", "/v1/embeddings", embedding.create),
        *(("POST", path, embedding.classify) for path in CLASSIFY_PATHS),
        *(("POST", path, rerank.rerank) for path in RERANK_PATHS),
        *(("POST", path, rerank.score) for path in SCORE_PATHS),
        ("GET", "/v1/models", models.list),
        ("GET", "/v1/models/{model:path}", models.retrieve),
        ("POST", "/v1/messages", messages.create),
        ("POST", "/v1/messages/count_tokens", messages.count_tokens),
        ("POST", "/generate", generate.generate),
        ("POST", "/open_session", sessions.open),
        ("POST", "/close_session", sessions.close),
        ("POST", "/tokenize", generate.tokenize),
        ("POST", "/detokenize", generate.detokenize),
        ("POST", "/abort_request", control.abort_request),
        ("POST", "/flush_cache", control.flush_cache),
        ("POST", "/pause_generation", control.pause_generation),
        ("POST", "/continue_generation", control.continue_generation),
        ("POST", "/update_weights_from_disk", control.update_weights),
        *(("POST", path, adapters.load) for path in LOAD_PATHS),
        *(("POST", path, adapters.unload) for path in UNLOAD_PATHS),
        ("GET", "/server_info", generate.server_info),
        ("GET", "/health", generate.health),
        ("GET", "/live", generate.live),
        ("GET", METRICS, Metrics(manager).scrape),
        ("GET", "/openapi.json", OpenApi(OPERATIONS).read),
    ]


def _stored_routes(
    manager: TokenizerManager, planner: ChatPlanner, stores: Stores | None, body_limit: int
) -> list[Route]:
    responses = OpenAIServingResponses(
        manager,
        planner,
        stores.responses if stores else None,
        stores.background if stores else None,
        stores.conversations if stores else None,
        body_limit,
    )
    conversations = OpenAIServingConversations(
        stores.conversations if stores else None, stores.responses if stores else None, body_limit
    )
    return [
        ("POST", "/v1/responses", responses.create),
        ("POST", "/v1/responses/input_tokens", responses.input_tokens),
        ("GET", "/v1/responses/{response_id}", responses.retrieve),
        ("DELETE", "/v1/responses/{response_id}", responses.delete),
        ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", responses.input_items),
        ("POST", "/v1/conversations", conversations.create),
        ("GET", "/v1/conversations/{conversation_id}", conversations.retrieve),
        ("POST", "/v1/conversations/{conversation_id}", conversations.update),
        ("DELETE", "/v1/conversations/{conversation_id}", conversations.delete),
        ("POST", "/v1/conversations/{conversation_id}/items", conversations.add_items),
        ("GET", "/v1/conversations/{conversation_id}/items", conversations.items),
        ("GET", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.item),
        ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.delete_item),
    ]
