"""A process among its peers, on an asyncio loop."""

import asyncio
import time
from collections.abc import Callable
from types import UnionType

from tercet.protocol.config import NodeConfig
from tercet.protocol.events import Delivery
from tercet.protocol.messages import Heartbeat, Message, Ready
from tercet.protocol.switchboard import Switchboard

BATCH = 64
"""Messages taken from the inbox before the loop serves others."""


class AsyncNode:
    """A node that lives on the running loop and calls `on_deliveries` there; it must not block and should not raise.

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
        self._board = Switchboard(config, inbox_union, status, None, clock)
        self._on_deliveries = on_deliveries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._receiving: asyncio.Handle | None = None
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
        """See `Switchboard.counters`."""
        return self._board.counters

    async def start(self) -> None:
        """Bind the inbox and begin to look for peers. Raises ChannelError if it cannot be bound."""
        self._board.open()
        self._loop = asyncio.get_running_loop()
        for descriptor in self._board.inbox.filenos():
            self._loop.add_reader(descriptor, self._receive)
        self._tick()

    def set_ready(self, ready: Ready) -> None:
        """Tell every peer that we can take work."""
        self._board.set_ready(ready)

    async def close(self, reason: str = "") -> None:
        """Say Goodbye with this reason and close every socket."""
        if self._loop is None:
            return
        for descriptor in self._board.inbox.filenos():
            self._loop.remove_reader(descriptor)
        for handle in (self._timer, self._receiving):
            if handle:
                handle.cancel()
        loop, self._loop = self._loop, None
        await loop.run_in_executor(None, self._board.close, reason or "closed")

    def _receive(self) -> None:
        """One batch; the rest in the next turn of the loop."""
        if self._loop is None:
            return
        deliveries, more = self._board.receive(BATCH)
        self._hand_over(deliveries, more=more)

    def _tick(self) -> None:
        """What is due, after a look into the inbox in case an edge was missed."""
        if self._loop is None:
            return
        deliveries, more = self._board.receive(BATCH)
        deliveries += self._board.tick()
        self._timer = self._loop.call_later(max(0.001, self._board.idle_time()), self._tick)
        self._hand_over(deliveries, more=more)

    def _hand_over(self, deliveries: list[Delivery], *, more: bool) -> None:
        assert self._loop is not None
        if self._receiving:
            self._receiving.cancel()
        self._receiving = self._loop.call_soon(self._receive) if more else None
        if deliveries:
            self._on_deliveries(deliveries)
