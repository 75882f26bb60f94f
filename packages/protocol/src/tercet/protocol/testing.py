"""Fakes and fixtures for whoever talks to peers: nodes without sockets, a clock by hand, small real networks."""

from collections.abc import Callable

from tercet.protocol.codec import Frame
from tercet.protocol.events import Delivery, PeerInfo
from tercet.protocol.messages import Message, Ready


class ScriptedClock:
    """A clock that moves when told to. Call it for the time."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        """The time."""
        return self.now

    def advance(self, seconds: float) -> float:
        """Let time go by; returns the new time."""
        self.now += seconds
        return self.now


class _Node:
    """What both fakes do: remember what was sent, refuse for peers in `full`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message, tuple[Frame, ...]]] = []
        self.full: set[str] = set()
        self.ready: Ready | None = None
        self.closed: str | None = None
        self.started = False
        self.counters: dict[str, int] = {}

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Remember it, or return False for a peer in `full`."""
        if peer in self.full:
            return False
        self.sent.append((peer, message, frames))
        return True

    def set_ready(self, ready: Ready) -> None:
        """Remember it in `ready`."""
        self.ready = ready

    def peers(self) -> list[PeerInfo]:
        """Nobody."""
        return []

    def take(self) -> list[tuple[str, Message, tuple[Frame, ...]]]:
        """What was sent since last asked."""
        sent, self.sent = self.sent, []
        return sent


class FakeNode(_Node):
    """Stands for a ThreadNode: `feed` it deliveries, `drain` them, look at `sent`. Never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._fed: list[Delivery] = []
        self.waits: list[float | None] = []
        self.woken = 0

    def start(self) -> None:
        """Nothing to bind."""
        self.started = True

    def feed(self, *deliveries: Delivery) -> None:
        """What the next `drain` returns."""
        self._fed += deliveries

    def drain(self, wait: float | None = 0) -> list[Delivery]:
        """What was fed, at once; the wait asked for is kept in `waits`."""
        self.waits.append(wait)
        fed, self._fed = self._fed, []
        return fed

    def wake(self) -> None:
        """Count it."""
        self.woken += 1

    def close(self, reason: str = "") -> None:
        """Remember why."""
        self.closed = reason


class FakeAsyncNode(_Node):
    """Stands for an AsyncNode: `feed` calls `on_deliveries` at once."""

    def __init__(self, on_deliveries: Callable[[list[Delivery]], None]) -> None:
        super().__init__()
        self.on_deliveries = on_deliveries

    async def start(self) -> None:
        """Nothing to bind."""
        self.started = True

    def feed(self, *deliveries: Delivery) -> None:
        """Deliver now."""
        self.on_deliveries(list(deliveries))

    async def close(self, reason: str = "") -> None:
        """Remember why."""
        self.closed = reason
