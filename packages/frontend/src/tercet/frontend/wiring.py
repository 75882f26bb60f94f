"""Assembly of a frontend process."""

import asyncio
import contextlib
import gc
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.config.config import FrontendConfig, ServingConfig
from tercet.frontend.config.validation import read_adapters, read_media_hosts
from tercet.frontend.database import Database
from tercet.frontend.lora.store import AdaptersInFile
from tercet.frontend.manager.quota import ApiKeyQuota
from tercet.frontend.manager.request_log import RequestLog
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.template_files import operator_template
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import POLICIES
from tercet.frontend.server.app import build_app
from tercet.frontend.server.connection_limit import max_grpc_connections
from tercet.frontend.server.listener import is_local, listening_socket, url_of
from tercet.frontend.server.stores import Stores
from tercet.frontend.server.uvicorn_server import HttpServer
from tercet.protocol.aio import AsyncNode
from tercet.protocol.config import Dial
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.full_inbox import FullFrontendInbox
from tercet.protocol.messages.messages import Heartbeat, Ready
from tercet.protocol.messages.values import Role
from tercet.protocol.system.clock import SuspendAwareClock
from tercet.protocol.transport.endpoints import check_peer_id, is_supervised_id

if TYPE_CHECKING:
    from tercet.frontend.grpc.server import GrpcServer
    from tercet.frontend.media.image_fetcher import ImageFetcher
    from tercet.frontend.server.tracing import Tracing

logger = logging.getLogger(__name__)

_STARTUP_WAIT = 1.0
"""Seconds that a frontend at a shared socket waits for schedulers at its start; the socket queues connections."""


def _start_tracing(endpoint: str, requests: RequestTable) -> "Tracing | None":
    """Return the traces for a collector. Without one, OpenTelemetry is not imported."""
    if not endpoint:
        return None
    from tercet.frontend.server.tracing import Tracing

    tracing = Tracing(endpoint, requests.peer, requests.counters.telemetry_failures)
    requests.reports.add(tracing.report)
    return tracing


def _fetcher(config: ServingConfig) -> "ImageFetcher | None":
    """Return the reader of images at URLs, if hosts are configured. Without any, no HTTP client is imported."""
    if not config.allowed_media_host:
        return None
    from tercet.frontend.media.image_fetcher import ImageFetcher

    return ImageFetcher(read_media_hosts(config.allowed_media_host))


def _grpc_server(manager: TokenizerManager, config: FrontendConfig) -> "GrpcServer | None":
    """Return the gRPC server, if an address is configured. Without one, gRPC is not imported."""
    if not config.http.grpc_listen:
        return None
    from tercet.frontend.grpc.server import GrpcServer

    return GrpcServer(manager, ChatPlanner(config.serving), config.http, max_grpc_connections())


class Frontend:
    """Frontend process: HTTP server and connections to peers. Raises OSError, ValueError for unusable options.

    `run` raises ValueError if the supervisor's model cannot be loaded, since no other model will come, and if a
    required adapter is refused.
    """

    def __init__(self, config: FrontendConfig) -> None:
        link, serving = config.link, config.serving
        self._listener = listening_socket(config.http)
        self._listening = self._servable = False
        self._shares_socket = config.http.fd is not None
        self._supervised = bool(link.supervisor)
        self._lora = read_adapters(serving.lora)
        self._adapters_ready = not serving.require_lora
        """Every required adapter is loaded."""
        self._fatal_error = ""
        """Reason why the frontend can never serve, or not completely."""
        self._schedulers_known = asyncio.Event()
        """Set once schedulers are known, or when the frontend stops."""
        self._pool = ThreadPoolExecutor(serving.tokenizer_threads, thread_name_prefix="tokenizer")
        specs = (
            *(Dial(Role.SCHEDULER, spec) for spec in link.scheduler),
            *(Dial(Role.DETOKENIZER, spec) for spec in link.detokenizer),
            *(Dial(Role.FRONTEND, f"{link.listen}/{check_peer_id(peer)}.*") for peer in link.sibling),
        )
        node_config = link.node_config(Role.FRONTEND, specs)
        self._node = AsyncNode(node_config, FullFrontendInbox, self._status, self._on_deliveries)
        clock = SuspendAwareClock()
        database = Database.open(config.store)
        dispatcher = Dispatcher(
            self._node, POLICIES[serving.routing_policy](), serving.recovery_timeout, serving.max_waiting
        )
        telemetry = config.telemetry
        requests = RequestTable(link.peer, dispatcher, ApiKeyQuota.of(config.http), clock)
        if telemetry.log_requests or telemetry.slow_request_seconds:
            requests.reports.add(RequestLog(telemetry).report)
        self._tracing = _start_tracing(telemetry.otlp_endpoint, requests)
        self._manager = TokenizerManager(
            self._node,
            ModelRegistry(
                self._pool,
                serving.served_model_name,
                threads=serving.tokenizer_threads,
                expected=len(link.scheduler),
                timeout=serving.recovery_timeout,
                clock=clock,
                on_unreadable=self._on_unreadable,
                chat_template=operator_template(serving.chat_template),
            ),
            requests,
            self._lora,
            AdaptersInFile(database) if database else None,
            link.sibling,
            _fetcher(serving),
        )
        self._stores = Stores(self._manager, ChatPlanner(serving), database) if database else None
        app = build_app(self._manager, config.http, serving, self._stores, local=is_local(self._listener))
        app = app if self._tracing is None else self._tracing.wrap(app)
        self._server = HttpServer(app, config.http, self._listener, self._on_started)
        self._grpc = _grpc_server(self._manager, config)

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; requests in flight may finish first."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._drain)
        await self._node.start()
        self._manager.start(self._on_servable)
        if self._stores is not None:
            self._stores.start()
        completing = None if self._adapters_ready else asyncio.create_task(self._require_adapters())
        try:
            if self._grpc is not None:
                await self._grpc.start()
            if self._shares_socket:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._schedulers_known.wait(), _STARTUP_WAIT)
            await self._server.serve_until_stopped()
            if self._fatal_error:
                raise ValueError(self._fatal_error)
        finally:
            if completing is not None:
                completing.cancel()
            if self._grpc is not None:
                await self._grpc.close()
            if self._stores is not None:
                await self._stores.close()
            await self._manager.close()
            await self._node.close("stopped")
            if self._tracing is not None:
                await asyncio.to_thread(self._tracing.close)
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _drain(self) -> None:
        """Drain; at the second signal, stop at once."""
        self._schedulers_known.set()
        self._server.drain(self._manager)

    def _on_unreadable(self, peer: str, reason: str) -> None:
        """Stop if the supervisor's model cannot be loaded: all its schedulers have the same one.

        Unusable schedulers that joined from elsewhere are ignored.
        """
        if not self._supervised or self._servable or not is_supervised_id(peer):
            logger.error(reason)
            return
        self._fail(reason)

    async def _require_adapters(self) -> None:
        if refusals := await self._manager.adapters.refusals():
            self._fail("; ".join(f"--lora {name}={self._lora[name]}: {why}" for name, why in refusals.items()))
        else:
            self._adapters_ready = True
            self._announce_ready()

    def _fail(self, reason: str) -> None:
        self._fatal_error = reason
        self._schedulers_known.set()
        self._server.stop()

    def _on_started(self) -> None:
        self._listening = True
        self._announce_ready()

    def _on_servable(self) -> None:
        self._servable = True
        self._schedulers_known.set()
        self._announce_ready()

    def _announce_ready(self) -> None:
        """Announce readiness once HTTP, a model and all required adapters are available."""
        if self._listening and self._servable and self._adapters_ready:
            gc.freeze()  # exclude start-up objects from collections, which would delay every stream
            self._node.set_ready(Ready(url=url_of(self._listener)))

    def _status(self, peer: str) -> Heartbeat:
        return self._manager.heartbeat(peer)

    def _on_deliveries(self, deliveries: list[Delivery]) -> None:
        self._manager.on_deliveries(deliveries)
