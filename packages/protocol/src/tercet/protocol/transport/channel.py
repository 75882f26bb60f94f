"""The sockets: one inbox to a process, one outbox to a peer. Nothing else sends or receives messages.

ZeroMQ's defaults wait for ever at close, queue to absent peers, and block when full. Here an outbox takes only what a
live connection has room for and says so, and closing discards what is left.
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
"""Seconds a connection gets to say what it has to before its first message."""

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | _HANDSHAKE_FAILED
)

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


@dataclass(frozen=True)
class Bounds:
    """How much one socket may hold."""

    queue: int = 1000
    """Messages waiting, on either side of a connection."""
    frame_bytes: int = 256 * 1024 * 1024
    """A larger frame is never sent; a peer that sends one is disconnected."""
    frames: int = 1024
    """Frames in one message; the rest are thrown away and the message counts as malformed."""


class Received(NamedTuple):
    """A message, and the role whose key its sender showed: None where there are no keys."""

    role: Role | None
    frames: list[Frame]


class Connection(Enum):
    """What happened to a connection."""

    UP = auto()
    LOST = auto()
    """It broke or could not begin; ZeroMQ tries again by itself."""
    FAILED = auto()
    """The other side does not take our key, or speaks no ZeroMQ: this socket tries no more."""


def _open(context: Context, kind: int, address: str, bounds: Bounds, security: Security | None) -> Socket:
    """A socket with every option that matters set. The one place where they are made."""
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
    """A bound PULL socket. Belongs to one thread; senders wait in their own queues while nobody reads.

    Over tcp:// with keys there is a doorkeeper: `receive` also lets in those who wait outside.
    """

    def __init__(
        self, context: Context, address: str, bounds: Bounds = Bounds(), security: Security | None = None
    ) -> None:
        self._path: Path | None = None
        self._door: ZapAuthenticator | None = None
        target = _check(address, security)
        if isinstance(target, Ipc):
            self._path = Path(target.path)
            make_private(self._path.parent)
            remove_stale(self._path)
        self._bounds = bounds
        self._socket = _open(context, zmq.PULL, address, bounds, security)
        if security and isinstance(target, Tcp):
            self._door = ZapAuthenticator(context, security)
            self._socket.curve_server = True
            self._socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
            self._socket.zap_enforce_domain = True
        try:
            self._socket.bind(address)
            if self._path:  # whatever the umask: its directory may be one that others can enter
                self._path.chmod(0o600)
        except (zmq.ZMQError, OSError) as error:
            self.close()
            raise ChannelError(f"cannot listen on {address}: {error}") from error
        self.address = address if self._path else self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def filenos(self) -> list[int]:
        """ZeroMQ's own descriptors, edge-triggered: after one wakes you, receive until there is nothing left."""
        return [int(socket.getsockopt(zmq.FD)) for socket in self._readable()]

    def admit(self) -> int:
        """Let in those who wait outside and have a key; returns how many had none."""
        return self._door.answer() if self._door else 0

    def receive(self) -> Received | None:
        """The next message, None when there is none; one of too many frames counts as having none.

        Frames 0 and 1 are bytes; later ones are views of ZeroMQ's own memory, not copied.
        """
        socket = self._socket
        role = None
        try:
            if self._door:
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
        return [self._socket, self._door.socket] if self._door else [self._socket]

    def close(self) -> None:
        """Stop listening and remove the socket's path."""
        self._socket.close()
        if self._door:
            self._door.close()
        if self._path:
            self._path.unlink(missing_ok=True)


class Outbox:
    """A PUSH socket connected to one address. Any thread may send; the others belong to the thread that made it.

    When its queue is full, or no connection is up, `send` returns False at once and the message is not sent: nothing
    ever waits for an absent peer. What is queued when a connection breaks is lost.
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
        """The role whose key is expected of the other side."""
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
            """ZeroMQ's own descriptor, edge-triggered: after it wakes you, ask for `connection_change`."""
            self._socket.connect(address)
        except zmq.ZMQError:
            self._socket.close()
            raise

    def send(self, frames: Sequence[Frame]) -> bool:
        """Queue one message. False, and nothing sent, when the queue is full, the peer absent or a frame too large."""
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
        """ZeroMQ wants every part of a message it began, also when the connection broke between two of them."""
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
        """Messages sent, and refused for want of room or because of their size."""
        return {"sent": self.sent, "refused_full": self.refused, "refused_oversized": self.oversized}

    def connection_change(self) -> Connection | None:
        """What happened last to the connection since last asked. Once it has failed, that stays its last."""
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
        """Close; what is queued gets `linger` seconds in the background to leave, and is then discarded."""
        with self._lock:
            if self._socket.closed:
                return
            self._socket.disable_monitor()
            self._socket.close(linger=round(linger * 1000))
        self._monitor.close(linger=0)


def _size(frame: Frame) -> int:
    return frame.nbytes if isinstance(frame, memoryview) else len(frame)


def make_private(directory: Path) -> None:
    """Make the directory (0700) if it is missing. Raises ChannelError unless it is ours and only we can write to it."""
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
    """Remove sockets that killed incarnations of the same peer left behind: those at which nobody listens."""
    peer = path.name.rsplit(".", 2)[0]
    for old in path.parent.glob(f"{glob.escape(peer)}.????????????????.ipc"):
        if not old.is_socket() or old.is_symlink():  # to connect to a file of another kind is refused, too
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
