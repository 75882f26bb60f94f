"""ZeroMQ sockets: one inbox per process and one outbox per peer. Only they send and receive messages.

ZeroMQ's defaults wait without limit at close, queue to absent peers, and block when full. An outbox accepts only what a
live connection has room for and reports a refusal; closing discards the rest.
"""

import contextlib
import glob
import os
import socket as posix
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from tercet.protocol.errors import AddressError, ChannelError
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.values import Role
from tercet.protocol.system.private_files import make_private_directory
from tercet.protocol.transport.endpoints import Ipc, Reach, Tcp, check_dialable, check_spec, parse
from tercet.protocol.transport.security import Security
from tercet.protocol.transport.zap_auth import DOMAIN, ZapAuthenticator

COPIED = 65536
"""Frames up to this many bytes are cheaper to copy than to share with ZeroMQ's thread."""

HANDSHAKE_TIME = 10.0
"""Seconds for the handshake of a connection."""

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _HANDSHAKE_FAILED
)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True)
class Bounds:
    """Limits of one socket."""

    queue: int = 1000
    """Messages waiting, on either side of a connection."""
    frame_bytes: int = 256 * 1024 * 1024
    """A larger frame is never sent; a peer that sends one is disconnected."""
    frames: int = 1024
    """Frames in one message; further ones are discarded and the message counts as malformed."""


class Received(NamedTuple):
    """Message, with the role whose key its sender has shown; None without keys."""

    role: Role | None
    frames: list[Frame]


class Connection(Enum):
    """Change of a connection."""

    UP = auto()
    LOST = auto()
    """Broken, or could not begin; ZeroMQ retries by itself."""
    FAILED = auto()
    """The other side refuses our key, or does not speak ZeroMQ; this socket does not retry."""


def _open(context: Context, kind: int, address: str, bounds: Bounds, security: Security | None) -> Socket:
    """Return a socket with every relevant option set. All sockets are made here."""
    socket = context.socket(kind)
    socket.linger = 0
    socket.maxmsgsize = bounds.frame_bytes
    socket.set_hwm(bounds.queue)
    socket.handshake_ivl = round(1000 * HANDSHAKE_TIME)
    target = _check(address, security)
    if isinstance(target, Tcp) and (":" in target.host or not target.is_literal):
        socket.ipv6 = True
    if security and isinstance(target, Tcp):
        socket.curve_secretkey, socket.curve_publickey = security.secret, security.public
    return socket


def _check(address: str, security: Security | None) -> Ipc | Tcp:
    return check_spec(address, Reach.ANYWHERE if security else Reach.LOOPBACK)


class Inbox:
    """Bound PULL socket. Belongs to one thread; messages wait in the senders' queues until they are read.

    Over tcp:// with keys it has a `ZapAuthenticator`; `admit` answers the clients that wait for it.
    """

    def __init__(
        self, context: Context, address: str, bounds: Bounds = Bounds(), security: Security | None = None
    ) -> None:
        self._path: Path | None = None
        self._authenticator: ZapAuthenticator | None = None
        target = _check(address, security)
        if isinstance(target, Ipc):
            self._path = Path(target.path)
            make_private(self._path.parent)
            remove_stale(self._path)
        self._bounds = bounds
        self._socket = _open(context, zmq.PULL, address, bounds, security)
        if security and isinstance(target, Tcp):
            self._authenticator = ZapAuthenticator(context, security)
            self._socket.curve_server = True
            self._socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
            self._socket.zap_enforce_domain = True
        try:
            self._socket.bind(address)
            if self._path:  # independent of the umask, since others may be able to enter the directory
                self._path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ChannelError(f"cannot listen on {address}: {error}") from error
        self.address = address if self._path else self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def filenos(self) -> list[int]:
        """Return ZeroMQ's own descriptors, edge-triggered: after a wake-up, receive until nothing is left."""
        return [int(socket.getsockopt(zmq.FD)) for socket in self._readable()]

    def admit(self) -> int:
        """Authenticate waiting clients; return how many were refused."""
        return self._authenticator.answer() if self._authenticator else 0

    def receive(self) -> Received | None:
        """Return the next message, or None; a message of too many frames is returned without frames.

        Frames 0 and 1 are bytes; later ones are views of ZeroMQ's own memory, not copied.
        """
        socket = self._socket
        role = None
        try:
            if self._authenticator:
                first = socket.recv(zmq.NOBLOCK, copy=False)
                role = Role(str(first.get("User-Id")))
                frames: list[Frame] = [first.bytes]
            else:
                frames = [socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        while socket.getsockopt(zmq.RCVMORE):
            if len(frames) == 1:
                frames.append(socket.recv())
            elif len(frames) < self._bounds.frames:
                frames.append(socket.recv(copy=False).buffer)
            else:
                return self._discard(role)
        return Received(role, frames)

    def _discard(self, role: Role | None) -> Received:
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(copy=False)
        return Received(role, [])

    def _readable(self) -> list[Socket]:
        return [self._socket, self._authenticator.socket] if self._authenticator else [self._socket]

    def close(self) -> None:
        self._socket.close()
        if self._authenticator:
            self._authenticator.close()
        if self._path:
            self._path.unlink(missing_ok=True)


class Outbox:
    """PUSH socket connected to one address. Any thread may send; the rest belongs to the thread that made it.

    When its queue is full, or no connection is up, `send` returns False at once and the message is not sent: nothing
    ever waits for an absent peer. Queued messages are lost when a connection breaks.
    """

    def __init__(
        self,
        context: Context,
        address: str,
        bounds: Bounds = Bounds(),
        security: Security | None = None,
        role: Role | None = None,
    ) -> None:
        self.address = check_dialable(address, Reach.ANYWHERE if security else Reach.LOOPBACK)
        self.sent = 0
        self.refused = 0
        self.oversized = 0
        self._limit = bounds.frame_bytes
        self._lock = threading.Lock()
        self.key = role if security and isinstance(parse(address), Tcp) else None
        """Role whose key is expected of the other side."""
        if security and self.key is None and isinstance(parse(address), Tcp):
            raise AddressError(f"{address}: whose key is expected there?")
        self._socket = _open(context, zmq.PUSH, address, bounds, security)
        if security and self.key:
            self._socket.curve_serverkey = security.publics[self.key]
        self._socket.immediate = 1
        self._socket.reconnect_ivl = 20
        self._socket.reconnect_ivl_max = 500
        try:
            self._monitor = self._socket.get_monitor_socket(_WATCHED)
            self.monitor = int(self._monitor.getsockopt(zmq.FD))
            """ZeroMQ's own descriptor, edge-triggered: after it becomes readable, call `connection_change`."""
            self._socket.connect(address)
        except zmq.ZMQError:
            self._socket.close()
            raise

    def send(self, frames: Sequence[Frame]) -> bool:
        """Queue one message; return False if the queue is full, the peer absent or a frame too large."""
        if any(_size(frame) > self._limit for frame in frames):
            self.oversized += 1
            return False
        with self._lock:
            accepted = not self._socket.closed and self._send_all(frames)
            if accepted:
                self.sent += 1
            else:
                self.refused += 1
        return accepted

    def _send_all(self, frames: Sequence[Frame]) -> bool:
        """Send all frames, even if the connection breaks between two: ZeroMQ requires each message to be completed."""
        accepted, last = True, len(frames) - 1
        for index, frame in enumerate(frames):
            more = zmq.NOBLOCK if index == last else zmq.NOBLOCK | zmq.SNDMORE
            try:
                self._socket.send(frame, more, copy=_size(frame) < COPIED)
            except zmq.Again:
                accepted = False
                if index == 0:
                    break
        return accepted

    @property
    def counters(self) -> dict[str, int]:
        """Counts of messages sent, and refused because of a full queue or their size."""
        return {"sent": self.sent, "refused_full": self.refused, "refused_oversized": self.oversized}

    def connection_change(self) -> Connection | None:
        """Return the last change of the connection since the last call. FAILED is final."""
        change = None
        while (event := self._event()) is not None:
            if event & _HANDSHAKE_FAILED or change is Connection.FAILED:
                change = Connection.FAILED
            else:
                change = Connection.UP if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else Connection.LOST
        return change

    def _event(self) -> int | None:
        try:
            return int(parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))["event"])
        except zmq.Again:
            return None

    def close(self, linger: float = 0) -> None:
        """Close the socket; queued messages get `linger` seconds in the background, then are discarded."""
        with self._lock:
            if self._socket.closed:
                return
            self._socket.disable_monitor()
            self._socket.close(linger=round(linger * 1000))
        self._monitor.close(linger=0)


def _size(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def make_private(directory: Path) -> None:
    """Make the directory (0700) if missing. Raises ChannelError unless it belongs to this user alone."""
    try:
        make_private_directory(directory)
        status = directory.stat()
    except OSError as error:
        raise ChannelError(f"{directory} cannot hold sockets: {error}") from error
    if status.st_uid != os.geteuid():
        raise ChannelError(f"{directory} belongs to user {status.st_uid}: sockets need a directory of our own")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ChannelError(f"{directory} is writable by others (mode {stat.S_IMODE(status.st_mode):04o}): use 0700")


def remove_stale(path: Path) -> None:
    """Remove sockets of killed incarnations of the same peer: those at which no process listens."""
    peer = path.name.rsplit(".", 2)[0]
    for old in path.parent.glob(f"{glob.escape(peer)}.????????????????.ipc"):
        if not old.is_socket() or old.is_symlink():  # connecting to a file of another kind is refused, too
            continue
        probe = posix.socket(posix.AF_UNIX, posix.SOCK_STREAM)
        with contextlib.closing(probe):
            probe.settimeout(0.2)
            try:
                probe.connect(str(old))
            except ConnectionRefusedError:
                old.unlink(missing_ok=True)
            except OSError:
                continue
