"""Publish numbered messages on a PUB socket, and replay recent ones on a ROUTER socket.

A message has three frames: topic, number (8 bytes, big-endian), payload. A request for replay is the first wanted
number; each recent message is answered as number and payload, and the number -1 with an empty payload ends the answer.
This is the format of KV events in vLLM and SGLang. ZeroMQ discards the messages of a subscriber whose queue is full, so
that a slow subscriber delays no publisher.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from tercet.protocol.errors import ChannelError
from tercet.protocol.transport.channel import Context, Socket

_END = (-1).to_bytes(8, "big", signed=True)
_STOP = b""
_SPARE = 1000
_MAX_REPLAY_REQUEST = 64
"""Bytes of a frame of a replay request; a client that sends more is disconnected."""


@dataclass(frozen=True)
class PublisherSettings:
    """Addresses and limits of a `ReplayPublisher`."""

    endpoint: str
    bind: bool
    """Bind the PUB socket, or connect it to a subscriber that has bound its own."""
    replay_endpoint: str | None
    topic: bytes
    buffer_steps: int
    """Messages that can be replayed."""
    hwm: int
    """Messages in the queue of a subscriber."""
    max_queue_size: int
    """Submitted messages that wait for the publisher's thread."""
    buffer_bytes: int = 256 << 20
    """Bytes of messages that can be replayed."""


class ReplayPublisher:
    """Publisher with a thread of its own, which also makes the payloads: `convert` gets what `submit` was given."""

    def __init__(self, settings: PublisherSettings, convert: Callable[[bytes], bytes]) -> None:
        """Open the sockets. Raises ChannelError."""
        self._settings = settings
        self._convert = convert
        self._context: Context = zmq.Context()
        address = f"inproc://submitted-{id(self)}"
        try:
            self._submitted = self._open(zmq.PULL, address, bind=True, queue=settings.max_queue_size)
            self._inlet = self._open(zmq.PUSH, address, bind=False, queue=settings.max_queue_size)
            self._pub = self._open(zmq.PUB, settings.endpoint, bind=settings.bind, queue=settings.hwm)
            self._replay: Socket | None = None
            if settings.replay_endpoint is not None:
                queue = 2 * settings.buffer_steps + _SPARE  # ZeroMQ frees the places of sent messages late
                self._replay = self._open(zmq.ROUTER, settings.replay_endpoint, bind=True, queue=queue)
                self._replay.maxmsgsize = _MAX_REPLAY_REQUEST
        except ChannelError:
            self._context.destroy(linger=0)
            raise
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        """Address of the PUB socket, with the port that it was given."""
        self.replay_endpoint = "" if self._replay is None else self._replay.getsockopt_string(zmq.LAST_ENDPOINT)
        self._number = 0
        self._recent: deque[tuple[bytes, bytes]] = deque()
        self._recent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="replay-publisher", daemon=True)
        self._thread.start()

    def submit(self, message: bytes) -> bool:
        """Publish a message that is not empty, without waiting. Return False if the thread's queue is full.

        Raises RuntimeError if the thread has died.
        """
        if not self._thread.is_alive():
            raise RuntimeError("the thread that publishes events has died")
        try:
            self._inlet.send(message, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Publish what was submitted, and close the sockets."""
        if self._thread.is_alive():
            self._inlet.send(_STOP)
            self._thread.join()
        self._context.destroy(linger=0)

    def _open(self, kind: int, address: str, *, bind: bool, queue: int) -> Socket:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(queue)
        socket.ipv6 = "[" in address
        try:
            (socket.bind if bind else socket.connect)(address)
        except zmq.ZMQError as error:
            raise ChannelError(f"cannot {'listen on' if bind else 'connect to'} {address}: {error}") from error
        return socket

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._submitted, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        while True:
            ready = {socket for socket, _ in poller.poll()}
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)
            if self._submitted in ready:
                message = self._submitted.recv()
                if message == _STOP:
                    return
                self._publish(self._convert(message))

    def _publish(self, payload: bytes) -> None:
        number = self._number.to_bytes(8, "big")
        self._number += 1
        self._recent.append((number, payload))
        self._recent_bytes += len(payload)
        while len(self._recent) > self._settings.buffer_steps or self._recent_bytes > self._settings.buffer_bytes:
            self._recent_bytes -= len(self._recent.popleft()[1])
        self._pub.send_multipart((self._settings.topic, number, payload))

    def _answer(self, replay: Socket) -> None:
        """Replay recent messages to a REQ or DEALER socket; a request of another form is ignored."""
        *path, first = replay.recv_multipart()
        if len(path) > 2 or len(first) != 8:
            return
        for number, payload in self._recent:
            if number >= first:
                replay.send_multipart((*path, number, payload))
        replay.send_multipart((*path, _END, b""))
