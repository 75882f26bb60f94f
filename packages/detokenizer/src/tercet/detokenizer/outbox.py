"""Messages on their way to frontends: in order, and kept for a while when a frontend takes none."""

import logging
from collections import Counter, deque

from tercet.protocol.messages.messages import BatchStrOutput
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)


class FrontendOutbox:
    """A bounded backlog for each frontend whose queue is full.

    A message that finds the backlog full drives out the oldest one. That frontend then misses positions, which it sees
    and recovers from; nobody else notices.
    """

    def __init__(self, sender: Sender, max_backlog: int, counters: Counter[str]) -> None:
        self._sender = sender
        self._max_backlog = max_backlog
        self._counters = counters
        """Adds to `dropped_backlog`, in messages."""
        self._backlogs: dict[str, deque[BatchStrOutput]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._backlogs.values()))

    def send(self, frontend: str, message: BatchStrOutput) -> None:
        """Send now, or as soon as what was kept before it has gone."""
        backlog = self._backlogs.get(frontend)
        if backlog is None:
            if self._sender.send(frontend, message):
                return
            backlog = self._backlogs[frontend] = deque(maxlen=self._max_backlog)
            logger.warning("%s takes no more messages", frontend)
        if len(backlog) == self._max_backlog:
            self._counters["dropped_backlog"] += 1
        backlog.append(message)

    def retry(self) -> None:
        """Send what was kept, as far as the frontends take it."""
        for frontend, backlog in list(self._backlogs.items()):
            while backlog and self._sender.send(frontend, backlog[0]):
                backlog.popleft()
            if not backlog:
                del self._backlogs[frontend]

    def drop(self, frontend: str) -> None:
        """Forget what was kept for a frontend that is gone."""
        self._backlogs.pop(frontend, None)
