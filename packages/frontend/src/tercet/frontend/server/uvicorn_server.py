"""uvicorn as this part runs it: bounded connections, our own signals and drains, and word of when it listens."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import uvicorn
from starlette.types import ASGIApp

from tercet.frontend.config.config import HttpConfig
from tercet.frontend.server.connection_limit import Connections, room_for_connections
from tercet.frontend.server.listener import BACKLOG
from tercet.frontend.server.protocol import BoundedProtocol, bounded_by

_TICK = 1.0
"""Seconds between looks at the clock, for the date in answers."""
_DRAIN_TICK = 0.1
"""The same while the end of what is under way is waited for."""
_LAST_CALL = 1
"""Seconds that a server which leaves gives to requests on their way: a client connects, or reads an answer, and then
sends."""
_AT_ONCE = 32
"""Connections that are accepted before anything is done about those there are. Some such lots are open before the first
of those too many is closed: they have to fit into what `room_for_connections` leaves."""


class Serving(Protocol):
    """Who answers the requests of a server."""

    @property
    def running(self) -> int:
        """Requests that are not done with."""

    def drain(self, last_call: float) -> None:
        """Refuse what comes after `last_call` seconds."""

    def give_up(self) -> None:
        """End what runs."""


class HttpServer(uvicorn.Server):
    """Serves an app on one socket until `should_exit`; calls `on_started` once it accepts connections."""

    def __init__(
        self, app: ASGIApp, config: HttpConfig, listener: socket.socket, on_started: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=bounded_by(config.max_header_bytes, Connections(room_for_connections())),
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=config.access_log,
                proxy_headers=False,
                server_header=False,
                backlog=_AT_ONCE,
                timeout_keep_alive=config.keep_alive,
                timeout_graceful_shutdown=config.shutdown_grace,
            )
        )
        self._listener = listener
        self._shares_socket = config.fd is not None
        self._on_started = on_started
        self._stopping = asyncio.Event()
        self._grace = config.shutdown_grace
        self._drained: _Drained | None = None

    async def run_until_told(self) -> None:
        """Serve until `stop`; then no new requests, and those in flight may finish."""
        await self.serve(sockets=[self._listener])

    def drain(self, serving: Serving) -> None:
        """End `run_until_told` once nothing runs; after the grace, or when called again, give up what does.

        At a shared socket new connections go to the other processes, and whatever comes on those accepted already is
        served, for nobody else could. A socket of its own goes on being listened to, for /health to tell; there new
        requests are refused after the last call.
        """
        now = asyncio.get_running_loop().time()
        grace = self._grace if self._drained is None else 0
        self._drained = _Drained(serving, now + _DRAIN_TICK, now + min(_LAST_CALL, grace), now + grace)
        serving.drain(math.inf if self._shares_socket else _LAST_CALL)
        if self._shares_socket:
            for server in getattr(self, "servers", ()):  # there are none before it has started
                server.close()
        for connection in self._connections():
            connection.leave(min(_LAST_CALL, grace))
        self._stopping.set()

    def stop(self) -> None:
        """End `run_until_told`; a second time, without waiting for requests in flight."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """uvicorn's, but it looks less often, and wakes up at once when told to stop."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _DRAIN_TICK if self._drained else _TICK)
            self._stopping.clear()
            if self._drained is not None:
                self._look_after(self._drained)

    def _look_after(self, drained: "_Drained") -> None:
        now = asyncio.get_running_loop().time()
        left = drained.deadline - now
        if left <= 0:
            drained.serving.give_up()
        if left <= 0 or self._is_done(drained, now):
            self.config.timeout_graceful_shutdown = max(1, int(left))
            self.should_exit = True

    def _is_done(self, drained: "_Drained", now: float) -> bool:
        """Whether nothing runs, and no connection may still bring a request."""
        if drained.serving.running or now < drained.earliest:
            return False
        connections = self._connections()
        return not connections or (now >= drained.last_call and not any(each.engaged for each in connections))

    def _connections(self) -> list[BoundedProtocol]:
        return list(self.server_state.connections)  # type: ignore[arg-type]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does, then tell.

        For asyncio a backlog is two things: how many may wait, and how many are accepted in one turn of the loop.
        """
        await super().startup(sockets)
        self._listener.listen(BACKLOG)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are handled by whoever runs the loop."""
        yield


class _Drained(NamedTuple):
    """What is waited for before the end."""

    serving: Serving
    earliest: float
    """When even connections that were being accepted are known."""
    last_call: float
    """When a connection that has brought no request is given up."""
    deadline: float
