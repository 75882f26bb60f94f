"""What the core says, on its way to peers. A full queue is the peer's problem: the loop neither blocks nor drops."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.protocol.messages.messages import Message
from tercet.scheduler.core.config import Arrival, PeerBlocked, PeerDrained
from tercet.scheduler.core.outputs import Outgoing

logger = logging.getLogger(__name__)

KEPT_FOR = 30.0
"""Seconds without one message taken after which a peer's backlog is given up: it never linked, or cannot read it."""
MOST_KEPT = 20_000
"""Messages kept for one peer. Only one that asks and never listens gets there: what was asked goes unanswered."""


class Send(Protocol):
    """How messages leave."""

    def __call__(self, peer: str, message: Message, *frames: bytes) -> bool:
        """Queue a message for a peer; False when its queue is full or it is not linked."""
        ...


@dataclass
class Backlog:
    """What waits for one peer, and since when it has taken nothing."""

    messages: deque[Outgoing]
    since: float


class BacklogSender:
    """Sends in order for each peer, keeps what does not go, and tells the core which peers to plan nothing for."""

    def __init__(self, send: Send, clock: Callable[[], float]) -> None:
        self._send = send
        self._clock = clock
        self._backlogs: dict[str, Backlog] = {}
        self._news: list[Arrival] = []

    @property
    def backlog(self) -> int:
        """Messages that wait for their peer."""
        return sum(len(kept.messages) for kept in self._backlogs.values())

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send, or keep behind what is kept for that peer already."""
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
        """The peer is gone: so is what was kept for it. Its requests come back by another route."""
        if self._backlogs.pop(peer, None) is not None:
            self._news.append(Arrival(peer, PeerDrained(peer)))

    def flush(self) -> list[Arrival]:
        """Try again. Returns, for the core, who became blocked or drained since the last call."""
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
