"""Frontend that listens on a free port, with a scripted engine behind it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from starlette.types import ASGIApp

from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.config.config import HttpConfig, ServingConfig, StoreConfig
from tercet.frontend.config.validation import read_adapters
from tercet.frontend.database import Database
from tercet.frontend.lora.store import AdaptersInFile
from tercet.frontend.manager.quota import ApiKeyQuota
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import RoundRobin
from tercet.frontend.server.app import build_app
from tercet.frontend.server.listener import listening_socket, url_of
from tercet.frontend.server.protocol import HttpLimits
from tercet.frontend.server.stores import Stores
from tercet.frontend.server.uvicorn_server import HttpServer
from tercet.frontend.testing.engine import FakeEngine


@dataclass(frozen=True)
class Served:
    """Listening frontend, with its engine and manager."""

    url: str
    engine: FakeEngine
    manager: TokenizerManager
    server: HttpServer
    ended: asyncio.Event
    """Set once the server has stopped listening."""
    stores: Stores | None = None

    async def connect(self) -> None:
        """Make the engine's peers and the model ready."""
        await _connected(self.engine, self.manager)

    def drain(self) -> None:
        """Drain the server, as SIGTERM does."""
        self.server.drain(self.manager)

    async def until_idle(self) -> None:
        """Wait until no request is in flight."""
        async with asyncio.timeout(10):
            while self.manager.running:  # noqa: ASYNC110 - nothing tells a test that the last request was released
                await asyncio.sleep(0.002)


@contextlib.asynccontextmanager
async def serving(
    engine: FakeEngine,
    http: HttpConfig = HttpConfig(),
    config: ServingConfig = ServingConfig(),
    *,
    connect: bool = True,
    names: tuple[str, ...] = (),
    recovery_timeout: float = 60.0,
    max_waiting: int = 256,
    peer: str = "frontend-0",
    store: StoreConfig = StoreConfig(),
    limits: HttpLimits = HttpLimits(),
    wrap: Callable[[ASGIApp, RequestTable], ASGIApp] = lambda app, _: app,
) -> AsyncIterator[Served]:
    """Serve on 127.0.0.1; with `connect`, the engine's peers are up and the model is ready."""
    with ThreadPoolExecutor(1) as pool:
        registry = ModelRegistry(pool, names)
        dispatcher = Dispatcher(engine, RoundRobin(), recovery_timeout, max_waiting)
        database = Database.open(store)
        manager = TokenizerManager(
            engine,
            registry,
            RequestTable(peer, dispatcher, ApiKeyQuota.of(http)),
            read_adapters(config.lora),
            AdaptersInFile(database) if database else None,
            engine.other_frontends,
        )
        engine.deliver = manager.on_deliveries
        started, ended = asyncio.Event(), asyncio.Event()
        listener = listening_socket(replace(http, host="127.0.0.1", port=0) if http.fd is None else http)
        stores = Stores(manager, ChatPlanner(config), database) if database else None
        server = HttpServer(
            wrap(build_app(manager, http, config, stores), manager.requests), http, listener, started.set, limits
        )
        url = url_of(listener)
        manager.start()
        if stores is not None:
            stores.start()
        running = asyncio.create_task(server.serve_until_stopped())
        running.add_done_callback(lambda _: ended.set())
        await started.wait()
        try:
            if connect:
                await _connected(engine, manager)
            yield Served(url, engine, manager, server, ended, stores)
        finally:
            server.stop()
            await running
            if stores is not None:
                await stores.close()
            await manager.close()


async def _connected(engine: FakeEngine, manager: TokenizerManager) -> None:
    engine.connect()
    async with asyncio.timeout(10):
        while not manager.ready:  # noqa: ASYNC110 - readiness comes with the tokenizer, from a thread
            await asyncio.sleep(0.001)
