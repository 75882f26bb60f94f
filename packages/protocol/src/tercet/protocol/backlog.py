"""Sender that keeps messages for peers whose queue is full: it neither blocks nor loses the order for each peer."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tercet.protocol.messages.messages import Message

logger = logging.getLogger(__name__)

Outgoing = tuple[str, Message, *tuple[bytes, ...]]
"""(peer, message, its raw frames)"""


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
    """Sender with a backlog of at most `most` messages for each blocked peer.

    With `patience`, a full backlog takes no more messages, and the backlog of a peer that accepts nothing for so many
    seconds is dropped. Otherwise a message that finds the backlog full replaces the oldest one.
    """

    def __init__(
        self,
        send: Send,
        most: int,
        clock: Callable[[], float],
        *,
        patience: float | None = None,
        counters: Counter[str] | None = None,
    ) -> None:
        """Create a sender. `counters` counts `dropped_backlog`: messages dropped because a backlog was full."""
        self._send = send
        self._most = most
        self._clock = clock
        self._patience = patience
        self._counters = Counter[str]() if counters is None else counters
        self._backlogs: dict[str, Backlog] = {}
        self._changes: list[tuple[str, bool]] = []

    @property
    def backlog(self) -> int:
        """Return the number of messages that wait for their peers."""
        return sum(len(backlog.messages) for backlog in self._backlogs.values())

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Send messages. Those for a peer with a backlog are appended to it."""
        for each in outgoing:
            backlog = self._backlogs.get(each[0])
            if backlog is None:
                if self._send(*each):
                    continue
                backlog = self._begin(each[0])
            if len(backlog.messages) == self._most:
                self._counters["dropped_backlog"] += 1
                if self._patience is not None:
                    continue
            backlog.messages.append(each)

    def forget(self, peer: str) -> None:
        """Drop the backlog of a peer that is down. Its requests come back by another route."""
        if self._backlogs.pop(peer, None) is not None:
            self._changes.append((peer, False))

    def flush(self) -> list[tuple[str, bool]]:
        """Retry all backlogs. Return (peer, whether it has a backlog) for every change since the last call."""
        for peer, backlog in list(self._backlogs.items()):
            while backlog.messages and self._send(*backlog.messages[0]):
                backlog.messages.popleft()
                backlog.since = self._clock()
            if not backlog.messages:
                self.forget(peer)
            elif self._patience is not None and self._clock() - backlog.since > self._patience:
                logger.warning(
                    "peer %s: queue full, backlog dropped: seconds=%.0f messages=%d",
                    peer,
                    self._patience,
                    len(backlog.messages),
                )
                self.forget(peer)
        changes, self._changes = self._changes, []
        return changes

    def _begin(self, peer: str) -> Backlog:
        if self._patience is None:
            logger.warning("peer %s: queue full, keeping a backlog: max_backlog=%d", peer, self._most)
        self._changes.append((peer, True))
        backlog = self._backlogs[peer] = Backlog(deque(maxlen=self._most), self._clock())
        return backlog
