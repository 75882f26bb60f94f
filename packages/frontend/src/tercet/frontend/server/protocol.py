"""HTTP of one connection, as uvicorn speaks it, within bounds of size and time."""

import asyncio
import logging

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from tercet.frontend.errors import ApiError, BadRequestError, HeadersTooLongError
from tercet.frontend.http.request_id import new_request_id
from tercet.frontend.http.sse import WRITE, Write
from tercet.frontend.server.connection_limit import Connections
from tercet.frontend.server.parser import OneProtocolParser
from tercet.protocol.logging import RateLimitedLogger

logger = logging.getLogger(__name__)

_HEAD_SECONDS = 30.0
"""Time that the head of a request has to arrive in, the first of a connection and every later one."""
_COMPLAINT_SECONDS = 6.0
"""Time between lines about what is no HTTP: anybody who reaches the port can cause them."""
_READ_SECONDS = 60.0
"""Time in which a client takes something of what there is for it: one that takes nothing is gone."""
_HEADER_COST = 32
"""Bytes that each header counts for besides its own (as in RFC 7541, 4.1): an empty one takes time, too."""
_FREE_PIECES = 1024
_PIECE_BYTES = 64
"""A body may arrive in so many pieces, whatever their size; those beyond must have so many bytes on average."""
_MOST_PIPELINED = 32
"""Requests that a client may send on one connection before it has the answer to the first."""
_TOO_LONG = "The headers of the request are too long."


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's, which has no such bounds, and takes the body of a request that offers another protocol for the next.

    Hangs up on request heads that are too long, or take too long to arrive, and on clients that do not read.
    """

    crowd: Connections
    """All of the server's."""
    head_limit = 0
    """Bytes of a head, trailers included; and of what else surrounds a body, at a stretch."""
    complaints: RateLimitedLogger
    """Of what is no HTTP, at any of the connections."""
    _in_head = False
    _header_bytes = 0
    """Of the headers and trailers of the request that arrives."""
    _idle_bytes = 0
    """Since the parser last had something to show for what it was fed."""
    _body_pieces = 0
    _body_bytes = 0
    """Of the request that arrives."""
    _progressed = False
    _leaves = False
    """Once idle, this connection is not waited for as long as others are."""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The time for its first request runs."""
        super().connection_made(transport)
        self._reading = OneProtocolParser(self)
        self.parser = self._reading  # type: ignore[assignment]
        self.crowd.opened(self, len(self.connections))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        self._head_came()
        self._has_read()
        self.crowd.gone(self)
        super().connection_lost(exc)

    @property
    def engaged(self) -> bool:
        """Whether a request is under way here, has begun to arrive, or may follow an answer that said so."""
        return self._answering or self._in_head or (self._leaves and self.timeout_keep_alive_task is not None)

    def leave(self, last_call: int) -> None:
        """Hang up `last_call` seconds after the answer that is under way, if there is one, unless a request comes.

        The head of that answer has promised to read another, and clients send it on the heels of the answer's end.
        """
        if self._answering:
            self._leaves, self.timeout_keep_alive = True, last_call

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
        if self._reading.resumes:
            return
        self._header_bytes, self._idle_bytes, self._in_head = 0, 0, True
        self._body_pieces = self._body_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the target."""
        if not self._reading.resumes:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header; or a trailer, which nobody reads."""
        if self._reading.resumes:
            return
        self._header_bytes += len(name) + len(value) + _HEADER_COST
        self._check_length()
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A head is whole."""
        if self._reading.resumes:
            return
        self._progressed, self._in_head = True, False
        self._head_came()
        self._check_length()
        super().on_headers_complete()
        if len(self.pipeline) > _MOST_PIPELINED:
            self._hang_up()
            raise ValueError("too many pipelined requests")
        if self.cycle is not None:
            self.scope[WRITE] = _writer(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body. Raises ValueError, which ends the parsing, where the pieces are too small."""
        self._progressed = True
        self._body_pieces += 1
        self._body_bytes += len(body)
        if self._body_pieces > _FREE_PIECES + self._body_bytes // _PIECE_BYTES:
            message = f"The body arrives in pieces of fewer than {_PIECE_BYTES} bytes: send it in larger chunks."
            self._refuse(BadRequestError(message))
            raise ValueError(message)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole."""
        if self._reading.offers:
            return
        self._progressed = True
        if self._answering:
            self.crowd.works(self)
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
        if not self._answering or self._awaits_body:
            self.crowd.waits(self)
        if self.transport.is_closing():
            self._await_reader()

    def timeout_keep_alive_handler(self) -> None:
        """No next request has come."""
        self._hang_up()

    def on_nonsense(self) -> None:
        """What arrives is no HTTP. The answer is in the words of every other error, unless there is one already."""
        self.complaints.warn("invalid HTTP request received", self.loop.time())
        if not self.transport.is_closing():
            self._refuse(BadRequestError("Invalid HTTP request received."))

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
                (b"x-request-id", new_request_id().encode()),
                (b"connection", b"close"),
            ]
            told = b"".join(b"%b: %b\r\n" % header for header in headers)
            self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[error.status], told, body))
        self._hang_up()

    @property
    def _awaits_body(self) -> bool:
        """Whether what arrives belongs to the request that is next to be answered."""
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline


def bounded_by(limit: int, crowd: Connections) -> type[BoundedProtocol]:
    """The protocol of one server, with this `head_limit`."""
    complaints = RateLimitedLogger(logger, _COMPLAINT_SECONDS)
    return type("BoundedProtocol", (BoundedProtocol,), {"head_limit": limit, "crowd": crowd, "complaints": complaints})


def _writer(cycle: RequestResponseCycle) -> Write:
    """See WRITE. Its response has begun, and has no content-length."""
    flow, transport = cycle.flow, cycle.transport

    def write(data: bytes) -> bool:
        if flow.write_paused or cycle.disconnected:
            return False
        transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    return write
