"""HTTP protocol of one connection: uvicorn's, with limits of size and time."""

import asyncio
import logging
from typing import NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tercet.frontend.errors import ApiError, BadRequestError, HeadersTooLongError
from tercet.frontend.http.request_id import new_request_id
from tercet.frontend.http.sse import WRITE, Write
from tercet.frontend.server.connection_limit import ConnectionLimiter
from tercet.frontend.server.parser import NoUpgradeParser
from tercet.protocol.logging import RateLimitedLogger

logger = logging.getLogger(__name__)

_LOG_SECONDS = 6.0
"""Seconds between log lines about invalid HTTP, which any client can cause."""
_HEADER_COST = 32
"""Bytes that each header counts in addition to its length (as in RFC 7541, 4.1), because empty headers take time,
too."""
_FREE_PIECES = 1024
_PIECE_BYTES = 64
"""A body may arrive in `_FREE_PIECES` pieces of any size; further pieces must have this many bytes on average."""
_MAX_PIPELINED = 32
"""Requests that a client may send on one connection before the first is answered."""
_TOO_LONG = "The headers of the request are too long."


class HttpLimits(NamedTuple):
    """Limits of a server that are not options."""

    connections: int | None = None
    """Open connections; by default as many as the open files of the process allow."""
    head_seconds: float = 30.0
    """Seconds in which the head of each request must arrive."""
    read_seconds: float = 60.0
    """Seconds in which a client must read some of its pending response, else it counts as gone."""
    last_call_seconds: int = 1
    """Seconds that a draining server leaves for requests on their way, from clients that have just connected or have
    just read a response."""


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits, and with a parser that ignores offers to upgrade.

    Closes connections whose request heads are too long or too slow, and those whose clients do not read.
    """

    limiter: ConnectionLimiter
    """The open connections of the server."""
    limits = HttpLimits()
    head_limit = 0
    """Maximum bytes of a head with its trailers, and of consecutive framing bytes around a body."""
    invalid_http_log: RateLimitedLogger
    """Logger for invalid HTTP, shared by all connections."""
    _in_head = False
    _header_bytes = 0
    """Bytes of the headers and trailers of the current request."""
    _idle_bytes = 0
    """Bytes since the parser last made progress."""
    _body_pieces = 0
    _body_bytes = 0
    """Bytes of the body of the current request."""
    _progressed = False
    _draining = False
    """The server is draining: this connection closes soon after it becomes idle."""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the timeout for the first request."""
        super().connection_made(transport)
        self._reading = NoUpgradeParser(self)
        self.parser = self._reading  # type: ignore[assignment]
        self.limiter.on_opened(self, len(self.connections))
        self._start_head_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timeouts."""
        self._cancel_head_timeout()
        self._cancel_read_timeout()
        self.limiter.on_closed(self)
        super().connection_lost(exc)

    @property
    def active(self) -> bool:
        """Return whether a request runs or arrives here, or may follow because the last response allowed it."""
        return self._responding or self._in_head or (self._draining and self.timeout_keep_alive_task is not None)

    def start_draining(self, last_call: int) -> None:
        """Close `last_call` seconds after the current response, if there is one, unless another request arrives.

        The head of that response has announced keep-alive, and clients send the next request right after its end.
        """
        if self._responding:
            self._draining, self.timeout_keep_alive = True, last_call

    @property
    def _responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, which may hold several requests."""
        self._progressed = False
        super().data_received(data)
        if self.transport.is_closing():
            return
        self._idle_bytes = 0 if self._progressed else self._idle_bytes + len(data)
        if self._idle_bytes > self.head_limit:
            self._refuse(HeadersTooLongError(_TOO_LONG))
            return
        if self._deadline is None and not self._responding and self.timeout_keep_alive_task is None:
            self._start_head_timeout()  # these bytes cancelled uvicorn's keep-alive timeout, but completed no head

    def on_message_begin(self) -> None:
        """Reset the counters for a new request."""
        if self._reading.resuming:
            return
        self._header_bytes, self._idle_bytes, self._in_head = 0, 0, True
        self._body_pieces = self._body_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._reading.resuming:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, or a trailer, which is ignored. Raises ValueError for a head that is too long."""
        if self._reading.resuming:
            return
        self._header_bytes += len(name) + len(value) + _HEADER_COST
        self._check_length()
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request whose head is complete. Raises ValueError for too many pipelined requests."""
        if self._reading.resuming:
            return
        self._progressed, self._in_head = True, False
        self._cancel_head_timeout()
        self._check_length()
        super().on_headers_complete()
        if len(self.pipeline) > _MAX_PIPELINED:
            self._close_gracefully()
            raise ValueError("too many pipelined requests")
        if self.cycle is not None:
            self.scope[WRITE] = _writer(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body. Raises ValueError, which ends parsing, if the pieces are too small."""
        self._progressed = True
        self._body_pieces += 1
        self._body_bytes += len(body)
        if self._body_pieces > _FREE_PIECES + self._body_bytes // _PIECE_BYTES:
            message = f"The body arrives in pieces of fewer than {_PIECE_BYTES} bytes: send it in larger chunks."
            self._refuse(BadRequestError(message))
            raise ValueError(message)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Mark the connection as busy once the request is complete."""
        if self._reading.offers_upgrade:
            return
        self._progressed = True
        if self._responding:
            self.limiter.mark_busy(self)
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the timeout for a client that reads too slowly."""
        super().pause_writing()
        self._start_read_timeout()

    def resume_writing(self) -> None:
        """Stop the timeout: the client has read all but a buffer."""
        self._cancel_read_timeout()
        if self.transport.is_closing():
            self._start_read_timeout()
        super().resume_writing()

    def on_response_complete(self) -> None:
        """Mark the connection as idle after a response, unless another request is pending."""
        super().on_response_complete()
        if not self._responding or self._awaits_body:
            self.limiter.mark_idle(self)
        if self.transport.is_closing():
            self._start_read_timeout()

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection: no further request has come in time."""
        self._close_gracefully()

    def on_invalid_http(self) -> None:
        """Answer invalid HTTP with an error in the API's format, unless a response has been started."""
        self.invalid_http_log.warn("http connection refused: invalid HTTP request", self.loop.time())
        if not self.transport.is_closing():
            self._refuse(BadRequestError("Invalid HTTP request received."))

    def _start_head_timeout(self) -> None:
        self._deadline = self.loop.call_later(self.limits.head_seconds, self._close_gracefully)

    def _cancel_head_timeout(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _start_read_timeout(self) -> None:
        """Check again later whether the client has read anything.

        Nothing is written meanwhile, so the buffer shrinks unless the client has stopped reading.
        """
        if self._unread is None:
            self._unread = self.loop.call_later(
                self.limits.read_seconds, self._check_reader, self.transport.get_write_buffer_size()
            )

    def _cancel_read_timeout(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _check_reader(self, before: int) -> None:
        self._unread = None
        if self.transport.get_write_buffer_size() < before:
            self._start_read_timeout()
        else:
            self.transport.abort()

    def _close_gracefully(self) -> None:
        """Close the connection once the client has read the pending bytes."""
        self.transport.close()
        self._start_read_timeout()

    def _check_length(self) -> None:
        """Raise ValueError, which ends parsing, if the head is too long."""
        if len(self.url) + self._header_bytes > self.head_limit:
            self._refuse(HeadersTooLongError(_TOO_LONG))
            raise ValueError(_TOO_LONG)

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, and send the error if it cannot be mistaken for part of another response."""
        if not self._responding or self._awaits_body:
            body = error.body()
            headers = [
                *self.server_state.default_headers,
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"x-request-id", new_request_id().encode()),
                (b"connection", b"close"),
            ]
            lines = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.status], lines, body))
        self._close_gracefully()

    @property
    def _awaits_body(self) -> bool:
        """Return whether arriving bytes belong to the next request to be answered."""
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline


def bounded_protocol(limit: int, limiter: ConnectionLimiter, limits: HttpLimits) -> type[BoundedProtocol]:
    """Return the protocol class of one server, with `limit` as its `head_limit`."""
    invalid_http_log = RateLimitedLogger(logger, _LOG_SECONDS)
    return type(
        "BoundedProtocol",
        (BoundedProtocol,),
        {"head_limit": limit, "limiter": limiter, "limits": limits, "invalid_http_log": invalid_http_log},
    )


def _writer(cycle: RequestResponseCycle) -> Write:
    """Return the `Write` (see WRITE) of a response that has started and has no content-length."""
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write
