"""A process among its peers: `ThreadNode` keeps its links alive while the main thread is busy."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Protocol

from tercet.protocol.config import NodeConfig
from tercet.protocol.errors import NodeFailed
from tercet.protocol.membership.events import Delivery, PeerDown, PeerEvent, PeerInfo, PeerReady, PeerUp
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import Heartbeat, Message
from tercet.protocol.node_core import Answer, NodeCore, unanswered
from tercet.protocol.search import Search

__all__ = [
    "Answer",
    "Delivery",
    "NodeConfig",
    "PeerDown",
    "PeerEvent",
    "PeerInfo",
    "PeerReady",
    "PeerUp",
    "Sender",
    "ThreadNode",
    "unanswered",
]

logger = logging.getLogger(__name__)

BATCH = 256
"""Messages taken from the inbox before heartbeats get their turn."""
MAX_PENDING = 10_000
"""Deliveries that may wait for the main thread; beyond it the inbox is left alone and senders feel full queues."""
PAUSE = 0.01
"""Seconds between looks at whether the main thread has caught up."""


class Sender(Protocol):
    """What most code needs of a node."""

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Queue a message; never waits. False if the peer is not up, its queue is full, or it cannot read this type."""
        ...


class ThreadNode:
    """A node whose daemon thread owns the sockets and sends the heartbeats. One other thread drains it; any may send.

    `status(peer)` and `answers` are called in the node's thread: they must be quick, and not wait for the main thread.
    """

    def __init__(
        self,
        config: NodeConfig,
        inbox_union: UnionType | type[Message],
        status: Callable[[str], Heartbeat],
        answers: Mapping[type[Message], Answer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = NodeCore(config, inbox_union, status, answers, clock)
        self._ready_batches: queue.SimpleQueue[list[Delivery]] = queue.SimpleQueue()
        self._clock = clock
        self._search = Search(config.supervisor, clock())
        self._thread = threading.Thread(target=self._run, name=f"tercet-node-{config.peer}", daemon=True)
        self._delivered = 0
        self._drained = 0
        self._stopping = ""
        self._failure: BaseException | None = None
        self.send = self._board.send
        self.set_ready = self._board.set_ready
        self.peers = self._board.peers

    @property
    def incarnation(self) -> str:
        """Names one start of the process."""
        return self._board.incarnation

    @property
    def address(self) -> str:
        """Where the inbox is bound, once started."""
        return self._board.inbox.address

    @property
    def counters(self) -> dict[str, int]:
        """See `NodeCore.counters`."""
        return self._board.counters

    @property
    def links(self) -> list[str]:
        """Every address that is dialled or that dialled us, and how far that came, in words. Safe from any thread."""
        return [str(link) for link in list(self._board.table.links.values())]

    def start(self) -> None:
        """Bind the inbox and begin to look for peers. Raises ChannelError if it cannot be bound."""
        self._board.open()
        self._thread.start()

    def drain(self, wait: float | None = 0) -> list[Delivery]:
        """All that came, after waiting at most `wait` seconds for the first (None: for ever).

        May be empty: after `wake`, or once the node is closed. Raises NodeFailed if the node's thread died.
        """
        deliveries: list[Delivery] = []
        try:
            if wait is None:
                deliveries += self._ready_batches.get()
            elif wait > 0:
                deliveries += self._ready_batches.get(timeout=wait)
            while True:
                deliveries += self._ready_batches.get_nowait()
        except queue.Empty:
            pass
        self._drained += len(deliveries)
        if self._failure is not None and not deliveries:
            raise NodeFailed(f"the node's thread died: {self._failure!r}") from self._failure
        return deliveries

    def wake(self) -> None:
        """Make a waiting `drain` return, or the next one not wait. Safe from any thread."""
        self._ready_batches.put([])

    def close(self, reason: str = "") -> None:
        """Say Goodbye with this reason, close every socket and end the thread."""
        self._stopping = reason or "closed"
        self._board.ring()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        board, more = self._board, True
        try:
            while not self._stopping:
                if self._delivered - self._drained > MAX_PENDING:
                    # Without ticks nobody is called silent while we do not listen.
                    board.beat()
                    board.admit()
                    time.sleep(PAUSE)
                    continue
                board.wait(0 if more else board.idle_time())
                deliveries, more = board.receive(BATCH)
                self._deliver(deliveries + board.tick())
                if complaint := self._search.complaint(board.table, self._clock()):
                    logger.warning("%s", complaint)
        except BaseException as error:
            logger.critical("the node's thread dies", exc_info=True)
            self._failure = error
        finally:
            board.close(self._stopping or "failed")
            self.wake()

    def _deliver(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._delivered += len(deliveries)
            self._ready_batches.put(deliveries)
