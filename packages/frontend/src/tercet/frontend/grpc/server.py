"""gRPC server of a frontend, beside its HTTP server: SGLang's scheduler service, health and reflection."""

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tercet.frontend.chat.planner import ChatPlanner
from tercet.frontend.config.config import HttpConfig
from tercet.frontend.grpc.schema import POOL, SERVICE
from tercet.frontend.grpc.service import SchedulerService
from tercet.frontend.http.auth import Keys
from tercet.frontend.manager.tokenizer_manager import TokenizerManager

_HEALTH_INTERVAL = 0.5
"""Seconds between two updates of the health service."""
_MAX_MESSAGE_BYTES = 4 << 20
"""Bytes of a message, which is parsed at once; those of the tokens of a million-token prompt are 3 MiB."""
_MAX_STREAMS = 1024
"""Calls at once on one connection."""
_MAX_CALLS = 8192
"""Calls at once, whose messages may lie in memory. Quotas of keys bound requests."""
_KEEPALIVE_MS = 30_000
_STOP_GRACE = 1.0
"""Seconds for the last answers of a server that has drained."""


class GrpcServer:
    """Server at `config.grpc_listen`, with at most `connections`. All methods run on the event loop's thread."""

    def __init__(
        self, manager: TokenizerManager, planner: ChatPlanner, config: HttpConfig, connections: int = 128
    ) -> None:
        self._config = config
        self._connections = connections
        keys = Keys(config.api_keys(), config.admin_key, open_admin=config.open_admin)
        self._service = SchedulerService(manager, planner, keys)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._updates: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen. Raises ValueError for an address that is in use."""
        options = [
            ("grpc.max_receive_message_length", min(_MAX_MESSAGE_BYTES, self._config.max_body_bytes)),
            ("grpc.max_metadata_size", self._config.max_header_bytes),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.max_allowed_incoming_connections", self._connections),
            ("grpc.keepalive_time_ms", _KEEPALIVE_MS),  # finds clients whose network is gone
            ("grpc.so_reuseport", int(self._config.fd is not None)),  # frontends with one HTTP socket share this port
        ]
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
        self._server.add_generic_rpc_handlers((self._service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        POOL.AddSerializedFile(health_pb2.DESCRIPTOR.serialized_pb)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME), self._server, pool=POOL)
        try:
            self.port = self._server.add_insecure_port(self._config.grpc_listen)
        except RuntimeError as error:
            raise ValueError(f"--grpc-listen {self._config.grpc_listen}: {error}") from None
        await self._server.start()
        self._updates = asyncio.create_task(self._update_health())

    async def close(self) -> None:
        """End calls that still run after a second."""
        if self._updates is not None:
            self._updates.cancel()
        await self._health.enter_graceful_shutdown()
        if self._server is not None:
            await self._server.stop(_STOP_GRACE)

    async def _update_health(self) -> None:
        while True:
            serving = health_pb2.HealthCheckResponse.SERVING
            status = serving if self._service.healthy else health_pb2.HealthCheckResponse.NOT_SERVING
            for name in ("", SERVICE):
                await self._health.set(name, status)
            await asyncio.sleep(_HEALTH_INTERVAL)
