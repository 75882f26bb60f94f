"""A node on an asyncio loop, and the thread that sends its heartbeats while the loop is busy."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from types import UnionType

from tercet.protocol.config import NodeConfig
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import Heartbeat, Message, Ready
from tercet.protocol.node import SupervisorWatch
from tercet.protocol.node_core import NodeCore

logger = logging.getLogger(__name__)

BATCH = 64
"""Messages received before the loop serves other callbacks."""
_AFTER_FAILURE = 0.1
"""Seconds until the next pass after one that raised, unless something arrives earlier."""


class Stall:
    """Measurement of a loop's lateness by periodic observations.

    Time between two distant observations is limited to `max_gap`: the process was suspended, and its loop with
    it.
    """

    def __init__(self, max_gap: float) -> None:
        self._max_gap = max_gap
        self._observed = float("-inf")
        self.age = 0.0
        self.longest = 0.0
        """Longest stall that has ended, in seconds."""

    def observe(self, now: float, due: float) -> None:
        """Observe the loop at a time when work is due since `due`."""
        late = now - due
        if late <= 0:
            self.longest, self.age = max(self.longest, self.age), 0.0
        else:
            self.age += min(late, now - self._observed, self._max_gap)
        self._observed = now


class StallWatch:
    """Daemon thread that calls `repeat(age, longest)` while the loop is over `interval` late for its heartbeat.

    `due` returns the time of that heartbeat. Both are called in the thread.
    """

    def __init__(
        self,
        due: Callable[[], float],
        repeat: Callable[[float, float], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._due = due
        self._repeat = repeat
        self._interval = interval
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tercet-heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread without waiting for it."""
        self._ended.set()

    def _run(self) -> None:
        stall = Stall(4 * self._interval)
        while not self._ended.wait(max(self._interval, self._due() + self._interval - self._clock())):
            stall.observe(self._clock(), self._due() + self._interval)
            if stall.age:
                self._repeat(stall.age, stall.longest)


class AsyncNode:
    """A node that lives on the running loop and calls `on_deliveries` there; the callback must not block or raise.

    While the loop is busy with one callback for long, a thread (`StallWatch`) sends the heartbeats and reports the
    stall. Peers count a slow loop as alive and a loop that never continues as stuck.

    ZeroMQ's descriptor is edge-triggered, so every wake-up receives until nothing is left, in batches, and yields to
    the loop between batches.
    """

    def __init__(
        self,
        config: NodeConfig,
        inbox_union: UnionType | type[Message],
        status: Callable[[str], Heartbeat],
        on_deliveries: Callable[[list[Delivery]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = NodeCore(config, inbox_union, status, None, clock)
        self._clock = clock
        self._watch = StallWatch(
            lambda: self._core.heartbeat_due, self._core.repeat_heartbeats, config.heartbeat_interval, clock
        )
        self._supervisor_watch = SupervisorWatch(config.supervisor, clock())
        self._on_deliveries = on_deliveries
        self._loop: asyncio.AbstractEventLoop | None = None
        self._next_run: asyncio.Handle | None = None
        self.send = self._core.send
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

    async def start(self) -> None:
        """Bind the inbox and begin to look for peers. Raises ChannelError if it cannot be bound."""
        self._core.open()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._core.fileno(), self._run_once)
        self._run_once()
        self._watch.start()

    def set_ready(self, ready: Ready) -> None:
        """Tell every peer that this process can take work."""
        self._core.set_ready(ready)

    async def close(self, reason: str = "") -> None:
        """Send Goodbye with this reason and close every socket."""
        if self._detach():
            await asyncio.get_running_loop().run_in_executor(None, self._core.close, reason or "closed")

    def close_now(self, reason: str = "") -> None:
        """Close without a thread, which cannot start while a process exits; the loop is blocked meanwhile."""
        if self._detach():
            self._core.close(reason or "closed")

    def _detach(self) -> bool:
        """Stop watching the sockets; return whether the node was running."""
        if self._loop is None:
            return False
        self._watch.stop()
        self._loop.remove_reader(self._core.fileno())
        if self._next_run:
            self._next_run.cancel()
        self._loop = None
        return True

    def _run_once(self) -> None:
        """Receive one batch and do what is due; the loop's next pass receives the rest.

        The next pass is scheduled even if this one raises, and messages already received are delivered.
        """
        if self._loop is None:
            return
        core, more, pause = self._core, False, _AFTER_FAILURE
        deliveries: list[Delivery] = []
        try:
            core.wait(0)
            deliveries, more = core.receive(BATCH)
            deliveries += core.tick()
            if warning := self._supervisor_watch.warning(core.table, self._clock()):
                logger.warning("%s", warning)
            pause = max(0.001, core.idle_time())
        finally:
            if self._next_run:
                self._next_run.cancel()
            self._next_run = (
                self._loop.call_soon(self._run_once) if more else self._loop.call_later(pause, self._run_once)
            )
            if deliveries:
                self._on_deliveries(deliveries)
