"""A node in a thread of its own: `ThreadNode` keeps its links alive while the main thread is busy."""

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
"""Messages received before heartbeats get their turn."""
MAX_PENDING = 10_000
"""Deliveries that may wait for the main thread; beyond it the inbox is not read and senders see full queues."""
PAUSE = 0.01
"""Seconds between checks for whether the main thread has caught up."""


class Sender(Protocol):
    """The part of a node that most code needs."""

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Queue a message without waiting; return False if the peer is down, full, or cannot decode the type."""
        ...


class ThreadNode:
    """A node whose daemon thread owns the sockets and sends the heartbeats.

    One other thread drains it; any thread may send. `status(peer)` and `answers` are called in the node's thread: they
    must be quick, and not wait for the main thread.
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
        """Id of this start of the process."""
        return self._board.incarnation

    @property
    def address(self) -> str:
        """Address of the bound inbox; only valid after `start`."""
        return self._board.inbox.address

    @property
    def counters(self) -> dict[str, int]:
        return self._board.counters

    @property
    def links(self) -> list[str]:
        """Descriptions of the links: address, state and peer. Thread-safe."""
        return [str(link) for link in list(self._board.table.links.values())]

    def start(self) -> None:
        """Bind the inbox and begin to look for peers. Raises ChannelError if it cannot be bound."""
        self._board.open()
        self._thread.start()

    def drain(self, wait: float | None = 0) -> list[Delivery]:
        """Return all pending deliveries, after waiting at most `wait` seconds (None: without limit) for the first.

        The list may be empty: after `wake`, or once the node is closed. Raises NodeFailed if the node's thread died.
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
        """Make a waiting `drain` return, or the next one not wait. Thread-safe."""
        self._ready_batches.put([])

    def close(self, reason: str = "") -> None:
        """Send Goodbye with this reason, close every socket and end the thread."""
        self._stopping = reason or "closed"
        self._board.ring()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        board, more = self._board, True
        try:
            while not self._stopping:
                if self._delivered - self._drained > MAX_PENDING:
                    # The table is not ticked while messages are not read, so no peer counts as silent.
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
