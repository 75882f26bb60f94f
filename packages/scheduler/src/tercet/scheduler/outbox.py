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

KEPT_FOR = 30.0
"""Seconds without an accepted message after which a peer's backlog is dropped: it never connected, or does not read."""
MOST_KEPT = 20_000
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
        self._news: list[Arrival] = []

    @property
    def backlog(self) -> int:
        """Return the number of messages that wait for their peers."""
        return sum(len(kept.messages) for kept in self._backlogs.values())

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send messages. Those for a peer with a backlog are appended to it."""
        for each in outgoing:
            peer, *_ = each
            kept = self._backlogs.get(peer)
            if kept is not None:
                if len(kept.messages) < MOST_KEPT:
                    kept.messages.append(each)
            elif not self._send(*each):
                self._backlogs[peer] = Backlog(deque([each]), self._clock())
                self._news.append(Arrival(peer, PeerBlocked(peer)))

    def forget(self, peer: str) -> None:
        """Drop a dead peer's backlog. Its requests come back by another route."""
        if self._backlogs.pop(peer, None) is not None:
            self._news.append(Arrival(peer, PeerDrained(peer)))

    def flush(self) -> list[Arrival]:
        """Retry all backlogs. Return events for the core: peers that became blocked or drained since the last call."""
        for peer, kept in list(self._backlogs.items()):
            while kept.messages and self._send(*kept.messages[0]):
                kept.messages.popleft()
                kept.since = self._clock()
            if kept.messages and self._clock() - kept.since > KEPT_FOR:
                logger.warning("%s took nothing for %.0f s: %d messages given up", peer, KEPT_FOR, len(kept.messages))
                self.forget(peer)
            elif not kept.messages:
                self.forget(peer)
        news, self._news = self._news, []
        return news
