"""A process among its peers, on an asyncio loop."""

import asyncio
import logging
import time
from collections.abc import Callable
from types import UnionType

from tercet.protocol.config import NodeConfig
from tercet.protocol.membership.events import Delivery
from tercet.protocol.membership.stall import StallWatch
from tercet.protocol.messages.messages import Heartbeat, Message, Ready
from tercet.protocol.node_core import NodeCore
from tercet.protocol.search import Search

logger = logging.getLogger(__name__)

BATCH = 64
"""Messages taken from the inbox before the loop serves others."""
_AFTER_FAILURE = 0.1
"""Seconds until the turn after one that failed, unless something comes before."""


class AsyncNode:
    """A node that lives on the running loop and calls `on_deliveries` there; it must not block and should not raise.

    While the loop is busy with one thing for long, heartbeats come from a thread (`StallWatch`) and say so. A loop that
    is only slow counts as alive, and one that never goes on as stuck.

    ZeroMQ's descriptor is edge-triggered, so every wake-up receives until nothing is left, a batch at a time, giving
    way to the loop between batches.
    """

    def __init__(
        self,
        config: NodeConfig,
        inbox_union: UnionType | type[Message],
        status: Callable[[str], Heartbeat],
        on_deliveries: Callable[[list[Delivery]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = NodeCore(config, inbox_union, status, None, clock)
        self._clock = clock
        self._watch = StallWatch(lambda: self._board.beat_due, self._board.beat_again, config.heartbeat_interval, clock)
        self._search = Search(config.supervisor, clock())
        self._on_deliveries = on_deliveries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next: asyncio.Handle | None = None
        self.send = self._board.send
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

    async def start(self) -> None:
        """Bind the inbox and begin to look for peers. Raises ChannelError if it cannot be bound."""
        self._board.open()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._board.fileno(), self._turn)
        self._turn()
        self._watch.start()

    def set_ready(self, ready: Ready) -> None:
        """Tell every peer that we can take work."""
        self._board.set_ready(ready)

    async def close(self, reason: str = "") -> None:
        """Say Goodbye with this reason and close every socket."""
        if self._leave():
            await asyncio.get_running_loop().run_in_executor(None, self._board.close, reason or "closed")

    def close_now(self, reason: str = "") -> None:
        """`close` that needs no thread, for there is none at the end of a process, and holds up the loop meanwhile."""
        if self._leave():
            self._board.close(reason or "closed")

    def _leave(self) -> bool:
        """Take no more turns. Whether there were any."""
        if self._loop is None:
            return False
        self._watch.stop()
        self._loop.remove_reader(self._board.fileno())
        if self._next:
            self._next.cancel()
        self._loop = None
        return True

    def _turn(self) -> None:
        """What came and what is due; what is more than a batch comes in the loop's next turn.

        A turn that fails is followed by another all the same, and what came in it is not lost.
        """
        if self._loop is None:
            return
        board, more, pause = self._board, False, _AFTER_FAILURE
        deliveries: list[Delivery] = []
        try:
            board.wait(0)
            deliveries, more = board.receive(BATCH)
            deliveries += board.tick()
            if complaint := self._search.complaint(board.table, self._clock()):
                logger.warning("%s", complaint)
            pause = max(0.001, board.idle_time())
        finally:
            if self._next:
                self._next.cancel()
            self._next = self._loop.call_soon(self._turn) if more else self._loop.call_later(pause, self._turn)
            if deliveries:
                self._on_deliveries(deliveries)
