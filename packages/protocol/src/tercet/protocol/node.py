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
from tercet.protocol.membership.peers import PeerTable
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import Heartbeat, Message
from tercet.protocol.messages.values import Role
from tercet.protocol.node_core import Answer, NodeCore, unanswered

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
    "SupervisorWatch",
    "ThreadNode",
    "unanswered",
]

logger = logging.getLogger(__name__)

BATCH = 256
"""Messages received before heartbeats get their turn."""
SUPERVISOR_WARNING_INTERVAL = 30.0
"""Seconds without a link to the supervisor before the first warning, and between two."""
PAUSE = 0.01
"""Seconds between checks for whether the main thread has caught up."""


class Sender(Protocol):
    """The part of a node that most code needs."""

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Queue a message without waiting; return False if the peer is down, full, or cannot decode the type."""
        ...


class SupervisorWatch:
    """Warnings of one node while it has no link to its supervisor; without a `spec` of one, there are none."""

    def __init__(self, spec: str, now: float) -> None:
        self._spec = spec
        self._since = self._last_warning = now

    def warning(self, table: PeerTable, now: float) -> str:
        """Return a warning if one is due: the supervisor's address, and the state of all links."""
        if not self._spec or any(peer.hello.role is Role.SUPERVISOR for peer in table.peers.values()):
            self._since = self._last_warning = now
        if now - self._last_warning < SUPERVISOR_WARNING_INTERVAL:
            return ""
        self._last_warning = now
        links = "; ".join(map(str, table.links.values())) or "none"
        return f"no connection to the supervisor address={self._spec} seconds={now - self._since:.0f} links: {links}"


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
        self._core = NodeCore(config, inbox_union, status, answers, clock)
        self._ready_batches: queue.SimpleQueue[list[Delivery]] = queue.SimpleQueue()
        self._clock = clock
        self._supervisor_watch = SupervisorWatch(config.supervisor, clock())
        self._thread = threading.Thread(target=self._run, name=f"tercet-node-{config.peer}", daemon=True)
        self._max_pending = config.max_pending
        self._delivered = 0
        self._drained = 0
        self._stopping = ""
        self._failure: BaseException | None = None
        self.send = self._core.send
        self.set_ready = self._core.set_ready
        self.peers = self._core.peers

    @property
    def incarnation(self) -> str:
        """Id of this start of the process."""
        return self._core.incarnation

    @property
    def address(self) -> str:
        """Address of the bound inbox; only valid after `start`."""
        return self._core.inbox.address

    @property
    def counters(self) -> dict[str, int]:
        return self._core.counters

    @property
    def links(self) -> list[str]:
        """Descriptions of the links: address, state and peer. Thread-safe."""
        return [str(link) for link in list(self._core.table.links.values())]

    def start(self) -> None:
        """Bind the inbox and begin to look for peers. Raises ChannelError if it cannot be bound."""
        self._core.open()
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
        self._core.wake()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        core, more = self._core, True
        try:
            while not self._stopping:
                if self._delivered - self._drained > self._max_pending:
                    # The table is not ticked while messages are not read, so no peer counts as silent.
                    core.send_heartbeats()
                    core.admit()
                    time.sleep(PAUSE)
                    continue
                core.wait(0 if more else core.idle_time())
                deliveries, more = core.receive(BATCH)
                self._deliver(deliveries + core.tick())
                if warning := self._supervisor_watch.warning(core.table, self._clock()):
                    logger.warning("%s", warning)
        except BaseException as error:
            logger.critical("node %s: its thread died, closing all links", core.config.peer, exc_info=True)
            self._failure = error
        finally:
            core.close(self._stopping or "failed")
            self.wake()

    def _deliver(self, deliveries: list[Delivery]) -> None:
        if deliveries:
            self._delivered += len(deliveries)
            self._ready_batches.put(deliveries)
