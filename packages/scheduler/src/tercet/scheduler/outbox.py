"""Sender of the core's messages.

If a peer's queue is full, its messages wait here; the loop neither blocks nor drops.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.protocol.messages.messages import Message
from tercet.scheduler.core.events import Arrival, PeerBlocked, PeerDrained
from tercet.scheduler.core.outputs import Outgoing

logger = logging.getLogger(__name__)

BACKLOG_TIMEOUT = 30.0
"""Seconds without an accepted message after which a peer's backlog is dropped: it never connected, or does not read."""
MAX_BACKLOG = 20_000
"""Limit of messages kept for one peer. Only a peer that sends requests and never reads gets there; more are dropped."""


class Send(Protocol):
    """A function that sends a message."""

    def __call__(self, peer: str, message: Message, *frames: bytes) -> bool:
        """Queue a message for a peer. Return False if its queue is full or it is not connected."""
        ...


@dataclass
class Backlog:
    """Messages that wait for one peer, and the time of the last one that it accepted."""

    messages: deque[Outgoing]
    since: float


class BacklogSender:
    """Sender that keeps the order for each peer, retries later, and reports blocked peers to the core."""

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._backlogs: dict[str, Backlog] = {}
        self._events: list[Arrival] = []

    @property
    def backlog(self) -> int:
        """Return the number of messages that wait for their peers."""
        return sum(len(backlog.messages) for backlog in self._backlogs.values())

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send messages. Those for a peer with a backlog are appended to it."""
        for each in outgoing:
            peer, *_ = each
            backlog = self._backlogs.get(peer)
            if backlog is not None:
                if len(backlog.messages) < MAX_BACKLOG:
                    backlog.messages.append(each)
            elif not self._send(*each):
                self._backlogs[peer] = Backlog(deque([each]), self._clock())
                self._events.append(Arrival(peer, PeerBlocked(peer)))

    def forget(self, peer: str) -> None:
        """Drop a dead peer's backlog. Its requests come back by another route."""
        if self._backlogs.pop(peer, None) is not None:
            self._events.append(Arrival(peer, PeerDrained(peer)))

    def flush(self) -> list[Arrival]:
        """Retry all backlogs. Return events for the core: peers that became blocked or drained since the last call."""
        for peer, backlog in list(self._backlogs.items()):
            while backlog.messages and self._send(*backlog.messages[0]):
                backlog.messages.popleft()
                backlog.since = self._clock()
            if backlog.messages and self._clock() - backlog.since > BACKLOG_TIMEOUT:
                logger.warning(
                    "peer %s: queue full, backlog dropped: seconds=%.0f messages=%d",
                    peer,
                    BACKLOG_TIMEOUT,
                    len(backlog.messages),
                )
                self.forget(peer)
            elif not backlog.messages:
                self.forget(peer)
        events, self._events = self._events, []
        return events
