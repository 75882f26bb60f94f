"""uvicorn server with bounded connections, own signal handling and draining, and a callback when it listens."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import uvicorn
from starlette.types import ASGIApp

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.server.connection_limit import ConnectionLimiter, max_connections
from tercet.frontend.server.listener import BACKLOG
from tercet.frontend.server.protocol import BoundedProtocol, HttpLimits, bounded_protocol

_TICK = 1.0
"""Seconds between ticks, which update the date header."""
_DRAIN_TICK = 0.1
"""Seconds between ticks while draining."""
_ACCEPT_BATCH = 8
"""Connections accepted in one turn of the loop. Several such batches are open before the first surplus connection is
closed, so they must fit into the reserve of `max_connections`."""


class Drainable(Protocol):
    """The request handler of a server, as far as draining needs it."""

    @property
    def running(self) -> int:
        """Return the number of unfinished requests."""

    def drain(self, last_call: float) -> None:
        """Refuse requests that arrive more than `last_call` seconds from now."""

    def fail_all(self) -> None:
        """End the running requests."""


class HttpServer(uvicorn.Server):
    """HTTP server on one socket until `should_exit`; calls `on_started` once it accepts connections."""

    def __init__(
        self,
        app: ASGIApp,
        config: HttpConfig,
        listener: socket.socket,
        on_started: Callable[[], None],
        limits: HttpLimits = HttpLimits(),
    ) -> None:
        limiter = ConnectionLimiter(limits.connections or max_connections())
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_protocol(config.max_header_bytes, limiter, limits),
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=config.access_log,
                proxy_headers=False,
                server_header=False,
                backlog=_ACCEPT_BATCH,
                timeout_keep_alive=config.keep_alive,
                timeout_graceful_shutdown=config.shutdown_grace,
            )
        )
        self._listener = listener
        self._limits = limits
        self._shares_socket = config.fd is not None
        self._on_started = on_started
        self._stopping = asyncio.Event()
        self._grace = config.shutdown_grace
        self._drain_state: _DrainState | None = None

    async def serve_until_stopped(self) -> None:
        """Serve until `stop`. Then accept no new requests, and let running ones finish."""
        await self.serve(sockets=[self._listener])

    def drain(self, drainable: Drainable) -> None:
        """End `serve_until_stopped` once no request runs.

        After the grace period, or on a second call, running requests are ended.

        On a shared socket, new connections go to the other processes. Requests on accepted connections are still
        served, because no other process can. An unshared socket keeps listening, so that /health can answer; new
        requests are refused after the last call.
        """
        now = asyncio.get_running_loop().time()
        grace = self._grace if self._drain_state is None else 0
        last_call = self._limits.last_call_seconds
        self._drain_state = _DrainState(drainable, now + _DRAIN_TICK, now + min(last_call, grace), now + grace)
        drainable.drain(math.inf if self._shares_socket else last_call)
        if self._shares_socket:
            for server in getattr(self, "servers", ()):  # absent before start-up
                server.close()
        for connection in self._connections():
            connection.start_draining(min(last_call, grace))
        self._stopping.set()

    def stop(self) -> None:
        """End `serve_until_stopped`; on a second call without waiting for running requests."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Run uvicorn's main loop with slower ticks, woken at once by `stop` and `drain`."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DRAIN_TICK if self._drain_state else _TICK)
            self._stopping.clear()
            if self._drain_state is not None:
                self._check_drain(self._drain_state)

    def _check_drain(self, state: "_DrainState") -> None:
        now = asyncio.get_running_loop().time()
        remaining = state.deadline - now
        if remaining <= 0:
            state.drainable.fail_all()
        if remaining <= 0 or self._is_drained(state, now):
            self.config.timeout_graceful_shutdown = max(1, int(remaining))
            self.should_exit = True

    def _is_drained(self, state: "_DrainState", now: float) -> bool:
        """Return whether no request runs and no connection may still bring one."""
        if state.drainable.running or now < state.earliest:
            return False
        connections = self._connections()
        return not connections or (now >= state.last_call and not any(each.active for each in connections))

    def _connections(self) -> list[BoundedProtocol]:
        return list(self.server_state.connections)  # type: ignore[arg-type]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start uvicorn, then call `on_started`.

        asyncio uses the backlog for two things: the length of the accept queue, and the number of connections accepted
        in one turn of the loop.
        """
        await super().startup(sockets)
        self._listener.listen(BACKLOG)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers: the owner of the loop has its own."""
        yield


class _DrainState(NamedTuple):
    """Deadlines of a draining server, in loop time."""

    drainable: Drainable
    earliest: float
    """Time from which connections that were being accepted are registered."""
    last_call: float
    """Time after which a connection without a request is ignored."""
    deadline: float
