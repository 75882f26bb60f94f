"""Outbox of messages to frontends: in order, with a bounded backlog while a frontend's queue is full."""

import logging
from collections import Counter, deque

from tercet.protocol.messages.messages import BatchStrOutput
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)


class FrontendOutbox:
    """Bounded backlog for each frontend whose queue is full.

    A message that finds the backlog full replaces the oldest one. That frontend then misses positions, which it notices
    and recovers from; other frontends are not affected.
    """

    def __init__(self, sender: Sender, max_backlog: int, counters: Counter[str]) -> None:
        self._sender = sender
        self._max_backlog = max_backlog
        self._counters = counters
        """Counts `dropped_backlog`, in messages."""
        self._backlogs: dict[str, deque[BatchStrOutput]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._backlogs.values()))

    def send(self, frontend: str, message: BatchStrOutput) -> None:
        """Send now, or after the backlog."""
        backlog = self._backlogs.get(frontend)
        if backlog is None:
            if self._sender.send(frontend, message):
                return
            backlog = self._backlogs[frontend] = deque(maxlen=self._max_backlog)
            logger.warning(
                "frontend %s: its queue is full, keeping a backlog max_backlog=%d", frontend, self._max_backlog
            )
        if len(backlog) == self._max_backlog:
            self._counters["dropped_backlog"] += 1
        backlog.append(message)

    def retry(self) -> None:
        """Send the backlogs as far as the frontends accept them."""
        for frontend, backlog in list(self._backlogs.items()):
            while backlog and self._sender.send(frontend, backlog[0]):
                backlog.popleft()
            if not backlog:
                del self._backlogs[frontend]

    def drop(self, frontend: str) -> None:
        """Drop the backlog of a frontend that is down."""
        self._backlogs.pop(frontend, None)
