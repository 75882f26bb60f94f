"""uvicorn as this part runs it: bounded request heads, our own signals, and word of when it listens."""

import asyncio
import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tercet.frontend.config import HttpConfig
from tercet.frontend.errors import ApiError, BadRequestError, HeadersTooLongError
from tercet.frontend.event_stream import WRITE, Write

_HEAD_SECONDS = 30.0
"""Time that the head of a request has to arrive in, the first of a connection and every later one."""
_READ_SECONDS = 60.0
"""Time in which a client takes something of what there is for it: one that takes nothing is gone."""
_TOO_LONG = "The headers of the request are too long."
_TICK = 1.0
"""Seconds between looks at the clock, for the date in answers."""
_DRAIN_TICK = 0.1
"""The same while the end of what is under way is waited for."""
_LAST_CALL = 1.0
"""Seconds that a server which leaves gives to requests on their way: a client connects, and then sends."""


class Serving(Protocol):
    """Who answers the requests of a server."""

    @property
    def running(self) -> int:
        """Requests that are not done with."""

    def drain(self, last_call: float) -> None:
        """Refuse what comes after `last_call` seconds."""

    def give_up(self) -> None:
        """End what runs."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, which has no such bounds.

    Hangs up on request heads that are too long, or take too long to arrive, and on clients that do not read.
    """

    head_limit = 0
    """Bytes of a head, trailers included; and of what else surrounds a body, at a stretch."""
    _in_head = False
    _header_bytes = 0
    """Of the headers and trailers of the request that arrives."""
    _idle_bytes = 0
    """Since the parser last had something to show for what it was fed."""
    _progressed = False
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time for its first request runs."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._head_came()
        self._has_read()
        super().connection_lost(exc)

    @property
    def engaged(self) -> bool:
        """Whether a request is under way here, or has begun to arrive."""
        return self._answering or self._in_head

    def close_when_answered(self) -> None:
        """Hang up after the answer that is under way, if there is one."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Some bytes of a request, or of several."""
        self._progressed = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._idle_bytes = 0 if self._progressed else self._idle_bytes + len(data)
        if self._idle_bytes > self.head_limit:
            self._refuse(HeadersTooLongError(_TOO_LONG))
            return
        if self._deadline is None and not self._answering and self.timeout_keep_alive_task is None:
            self._wait_for_head()  # these bytes have ended uvicorn's wait for a next request, and completed none

    def on_message_begin(self) -> None:
        """A head begins."""
        self._header_bytes, self._idle_bytes, self._in_head = 0, 0, True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which nobody reads."""
        self._header_bytes += len(name) + len(value)
        self._check_length()
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._progressed, self._in_head = True, False
        self._head_came()
        self._check_length()
        super().on_headers_complete()
        if self.cycle is not None:
            self.scope[WRITE] = _writer(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """A piece of a body."""
        self._progressed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        self._progressed = True
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client is behind."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """It has caught up, but for what fits into the buffer."""
        self._has_read()
        if self.transport.is_closing():
            self._await_reader()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """An answer is whole, and may have been the last."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """No next request has come."""
        self._hang_up()

    def send_400_response(self, msg: str) -> None:
        """In the words of every other error, unless there is an answer already."""
        if not self.transport.is_closing():
            self._refuse(BadRequestError(msg))

    def _wait_for_head(self) -> None:
        self._deadline = self.loop.call_later(_HEAD_SECONDS, self._hang_up)

    def _head_came(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _await_reader(self) -> None:
        """Look again later. Nothing is written meanwhile: what is unread gets less, unless nobody reads."""
        if self._unread is None:
            self._unread = self.loop.call_later(_READ_SECONDS, self._look, self.transport.get_write_buffer_size())

    def _has_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _look(self, before: int) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() < before:
            self._await_reader()
        else:
            self.transport.abort()

    def _hang_up(self) -> None:
        """Close, once what is written has been read."""
        self.transport.close()
        self._await_reader()

    def _check_length(self) -> None:
        """Raises ValueError, which ends the parsing."""
        if len(self.url) + self._header_bytes > self.head_limit:
            self._refuse(HeadersTooLongError(_TOO_LONG))
            raise ValueError(_TOO_LONG)

    def _refuse(self, error: ApiError) -> None:
        """Hang up, and say why where that cannot be taken for a part of another answer."""
        if not self._answering or self._awaits_body:
            body = error.body()
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
            ]
            told = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.status], told, body))
        self._hang_up()

    @property
    def _awaits_body(self) -> bool:
        """Whether what arrives belongs to the request that is next to be answered."""
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline


def _bounded_by(limit: int) -> type[BoundedProtocol]:
    return type("BoundedProtocol", (BoundedProtocol,), {"head_limit": limit})


def _writer(cycle: RequestResponseCycle) -> Write:
    """See WRITE. Its response has begun, and has no content-length."""
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write


class HttpServer(uvicorn.Server):
    """Serves an app on one socket until `should_exit`; calls `on_started` once it accepts connections."""

    def __init__(
        self, app: ASGIApp, config: HttpConfig, listener: socket.socket, on_started: Callable[[], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=_bounded_by(config.max_header_bytes),
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=config.access_log,
                proxy_headers=False,
                server_header=False,
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
            connection.close_when_answered()
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
        """As uvicorn does, then tell."""
        await super().startup(sockets)
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


def listening_socket(config: HttpConfig) -> socket.socket:
    """The inherited socket, or one of our own. Raises OSError."""
    if config.fd is not None:
        return socket.socket(fileno=config.fd)
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    return socket.create_server((config.host, config.port), family=family, backlog=2048)


def url_of(listener: socket.socket) -> str:
    """Where clients on this machine reach it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
