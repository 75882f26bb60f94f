"""Routes of SGLang's own API."""

from tercet.frontend.api.sglang.adapter_routes import AdapterRoutes
from tercet.frontend.api.sglang.client_ids import ClientIds
from tercet.frontend.api.sglang.control_routes import ControlRoutes
from tercet.frontend.api.sglang.encode import EncodeRoutes
from tercet.frontend.api.sglang.generate import GenerateRoutes
from tercet.frontend.api.sglang.info_routes import InfoRoutes
from tercet.frontend.api.sglang.parse_routes import ParseRoutes
from tercet.frontend.api.sglang.profile_routes import ProfileRoutes
from tercet.frontend.api.sglang.session_routes import SessionRoutes
from tercet.frontend.api.sglang.session_store import SessionStore
from tercet.frontend.api.sglang.training_routes import TrainingRoutes
from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.http.route import Route
from tercet.frontend.manager.tokenizer_manager import TokenizerManager


def sglang_routes(
    manager: TokenizerManager, planner: ChatPlanner, session_store: SessionStore | None, body_limit: int
) -> list[Route]:
    sessions, ids = SessionRoutes(session_store, body_limit), ClientIds()
    return [
        *GenerateRoutes(manager, sessions, ids, body_limit, planner.reasoning_field).routes,
        *sessions.routes,
        *EncodeRoutes(manager, body_limit).routes,
        *ParseRoutes(manager.adapters, planner, body_limit).routes,
        *InfoRoutes(manager, planner).routes,
        *ControlRoutes(manager, ids, body_limit).routes,
        *TrainingRoutes(manager, body_limit).routes,
        *ProfileRoutes(manager, body_limit).routes,
        *AdapterRoutes(manager.adapters, body_limit).routes,
    ]
