"""Publisher of KV events, which observes the radix tree of a core."""

import logging
import time
from collections import deque

import msgspec

from tercet.protocol.transport.replay_publisher import ReplayPublisher
from tercet.scheduler.core.cache.tree_changes import TreeChange
from tercet.scheduler.kv_events.config import KVEventsConfig
from tercet.scheduler.kv_events.events import BatchEncoder

logger = logging.getLogger(__name__)

_ENCODER = msgspec.msgpack.Encoder()


class KVEventPublisher:
    """Publisher of the changes that `record` was called with. All methods run in the loop's thread."""

    def __init__(self, config: KVEventsConfig, page_size: int, rank: int) -> None:
        """Open the sockets, and publish that the cache is empty. Raises ChannelError."""
        encoder = BatchEncoder(page_size, rank, time.time)
        settings = config.settings(rank)
        self._publisher = ReplayPublisher(settings, encoder.encode)
        self.endpoint = self._publisher.endpoint
        logger.info(
            "KV events are published without authentication and hold prompts: endpoint=%s socket=%s",
            self.endpoint,
            "bound" if settings.bind else "connected",
        )
        self._changes: list[TreeChange] = []
        self._batches = deque([_ENCODER.encode(self._changes)])
        """Encoded batches that are not submitted yet."""
        self.flush()

    def record(self, change: TreeChange) -> None:
        """Add a change to the next batch."""
        self._changes.append(change)

    def flush(self) -> None:
        """Publish the changes since the last call as one batch. A batch that the queue has no room for is kept."""
        if self._changes:
            self._batches.append(_ENCODER.encode(self._changes))
            self._changes.clear()
        while self._batches and self._publisher.submit(self._batches[0]):
            self._batches.popleft()

    def close(self) -> None:
        self._publisher.close()
