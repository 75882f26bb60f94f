"""Test doubles for nodes: fake nodes without sockets, a scripted clock, and small real networks."""

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Self

from tercet.protocol.config import NodeConfig
from tercet.protocol.membership.events import Delivery, PeerInfo
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.full_inbox import FullFrontendInbox
from tercet.protocol.messages.messages import (
    DetokenizerInbox,
    Heartbeat,
    Message,
    Ready,
    SchedulerInbox,
    SupervisorInbox,
)
from tercet.protocol.messages.values import Phase, Role
from tercet.protocol.node import ThreadNode
from tercet.protocol.node_core import Answer


class ScriptedClock:
    """Clock that only moves by `advance`. Call it for the time."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Advance the clock and return the new time."""
        self.now += seconds
        return self.now


class _Node:
    """Common part of the fakes: records sent messages, and refuses those for peers in `full`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message, tuple[Frame, ...]]] = []
        self.full: set[str] = set()
        self.ready: Ready | None = None
        self.closed: str | None = None
        self.started = False
        self.counters: dict[str, int] = {}

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Record a message, or return False for a peer in `full`."""
        if peer in self.full:
            return False
        self.sent.append((peer, message, frames))
        return True

    def set_ready(self, ready: Ready) -> None:
        self.ready = ready

    def peers(self) -> list[PeerInfo]:
        """Return no peers."""
        return []

    def take(self) -> list[tuple[str, Message, tuple[Frame, ...]]]:
        """Return and clear the messages sent since the last call."""
        sent, self.sent = self.sent, []
        return sent


class FakeNode(_Node):
    """Fake of a ThreadNode: `feed` it deliveries, `drain` them, read `sent`. Never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._fed: list[Delivery] = []
        self.waits: list[float | None] = []
        self.woken = 0

    def start(self) -> None:
        self.started = True

    def feed(self, *deliveries: Delivery) -> None:
        """Append deliveries for the next `drain`."""
        self._fed += deliveries

    def drain(self, wait: float | None = 0) -> list[Delivery]:
        """Return the deliveries fed so far; the requested wait is appended to `waits`."""
        self.waits.append(wait)
        fed, self._fed = self._fed, []
        return fed

    def wake(self) -> None:
        """Count the call."""
        self.woken += 1

    def close(self, reason: str = "") -> None:
        self.closed = reason


class FakeAsyncNode(_Node):
    """Fake of an AsyncNode: `feed` calls `on_deliveries` at once."""

    def __init__(self, on_deliveries: Callable[[list[Delivery]], None]) -> None:
        super().__init__()
        self.on_deliveries = on_deliveries

    async def start(self) -> None:
        self.started = True

    def feed(self, *deliveries: Delivery) -> None:
        self.on_deliveries(list(deliveries))

    async def close(self, reason: str = "") -> None:
        self.closed = reason


INBOXES: dict[Role, UnionType] = {
    Role.FRONTEND: FullFrontendInbox,
    Role.SCHEDULER: SchedulerInbox,
    Role.DETOKENIZER: DetokenizerInbox,
    Role.SUPERVISOR: SupervisorInbox,
}


class Network:
    """Real nodes over ipc:// in a private temporary directory. A context manager that closes every node.

    Frontends dial every scheduler and detokenizer, all others dial a supervisor, and timeouts are short.
    """

    def __init__(self, heartbeat_interval: float = 0.05, silence: float = 1.0) -> None:
        self.heartbeat_interval = heartbeat_interval
        self.silence = silence
        self._directory = tempfile.TemporaryDirectory(prefix="tercet-")
        self.directory = Path(self._directory.name, "run")
        self._nodes: list[ThreadNode] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.close("the test is over")
        self._directory.cleanup()

    def config(self, role: Role, peer: str = "", **settings: Any) -> NodeConfig:
        """Return the configuration of one more node; `settings` are further fields of it."""
        listen = f"ipc://{self.directory}"
        settings.setdefault("heartbeat_interval", self.heartbeat_interval)
        settings.setdefault("silence", self.silence)
        if role is Role.FRONTEND:
            settings.setdefault("connect", (f"{listen}/scheduler-*", f"{listen}/detokenizer-*"))
        if role is not Role.SUPERVISOR:
            settings.setdefault("supervisor", f"{listen}/supervisor.*")
        name = role.value if role is Role.SUPERVISOR else f"{role.value}-0"
        return NodeConfig(role, peer or name, listen, **settings)

    def node(
        self,
        role: Role,
        peer: str = "",
        *,
        status: Callable[[str], Heartbeat] = lambda _: Heartbeat(phase=Phase.IDLE),
        answers: Mapping[type[Message], Answer] | None = None,
        **settings: Any,
    ) -> ThreadNode:
        """Return a started node of that role; its id is `scheduler-0` and so on unless given."""
        node = ThreadNode(self.config(role, peer, **settings), INBOXES[role], status, answers)
        node.start()
        self._nodes.append(node)
        return node


class Listener:
    """Reader of a node's deliveries that waits for those a test expects. `heard` keeps all of them."""

    def __init__(self, node: ThreadNode) -> None:
        self.node = node
        self.heard: list[Delivery] = []
        self._next = 0

    def wait_for(self, kind: type[object], source: str = "", timeout: float = 10.0) -> Delivery:
        """Return the next delivery of that kind (and from that peer, if named); skip others.

        Raises TimeoutError, with the deliveries that came instead.
        """
        end = time.monotonic() + timeout
        start = self._next
        while True:
            while self._next < len(self.heard):
                delivery = self.heard[self._next]
                self._next += 1
                if isinstance(delivery.message, kind) and source in {"", delivery.source}:
                    return delivery
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"no {kind.__name__} within {timeout} s, but {self.heard[start:]}")
            self.heard += self.node.drain(left)
