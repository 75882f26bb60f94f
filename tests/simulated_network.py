"""Simulated network beneath real nodes: addresses, connections that break, queues that fill, links that hang.

Each connection keeps its order, as in ZeroMQ. Part of a killed process's queue is still sent; the queue is lost when a
connection breaks. A cut link carries nothing until it is restored, and then everything.
"""

import fnmatch
import functools
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import UnionType

from tercet.protocol.config import NodeConfig
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import Heartbeat, Message
from tercet.protocol.messages.values import Role
from tercet.protocol.node_core import GOODBYE_TIME, Answer, NodeCore, Sockets
from tercet.protocol.transport.channel import Connection, Inbox, Outbox, Received
from tercet.protocol.transport.endpoints import Resolver, bind_address
from tercet.protocol.transport.poller import Poller

QUEUE = 60
"""Messages that wait at either end of a connection."""
LATEST = 2
"""Highest delay of a message, in ticks."""
RECONNECT = 4
"""Ticks between attempts to connect."""


class SimulatedInbox(Inbox):
    """Inbox of one incarnation of a process."""

    def __init__(self, network: "Network", owner: str, address: str) -> None:
        self.address = address
        self.owner = owner
        self.open = True
        self.arrived: deque[list[Frame]] = deque()
        self._network = network

    def admit(self) -> int:
        return 0

    def receive(self) -> Received | None:
        return Received(None, self.arrived.popleft()) if self.arrived else None

    def close(self) -> None:
        self.open = False
        if self._network.inboxes.get(self.address) is self:
            del self._network.inboxes[self.address]


class SimulatedOutbox(Outbox):
    """Outgoing connection of one incarnation of a process."""

    def __init__(self, network: "Network", owner: str, address: str) -> None:
        self.address = address
        self.owner = owner
        self.key = None
        self.sent = self.refused = self.oversized = 0
        self.monitor = 0
        self.news: Connection | None = None
        self.closed = False
        self._network = network
        self._peer: SimulatedInbox | None = None
        self._queue: deque[tuple[int, list[Frame]]] = deque()
        self._next_try = network.now

    def send(self, frames: Sequence[Frame]) -> bool:
        if self.closed or self._peer is None or len(self._queue) >= QUEUE:
            self.refused += 1
            return False
        self.sent += 1
        network = self._network
        if network.chance.random() >= network.loss:
            self._queue.append((network.now + network.chance.randint(0, LATEST), [bytes(each) for each in frames]))
        return True

    def connection_change(self) -> Connection | None:
        news, self.news = self.news, None
        return news

    def close(self, linger: float = 0) -> None:
        if not self.closed:
            self.closed = True
            if not linger:
                self.cut_short()

    def cut_short(self) -> None:
        """Drop a random tail of the queue; the part before it was sent already."""
        kept = self._network.chance.randint(0, len(self._queue))
        while len(self._queue) > kept:
            self._queue.pop()

    @property
    def over(self) -> bool:
        """Return whether the connection can deliver nothing more."""
        return self.closed and not (self._queue and self._peer)

    def tick(self) -> None:
        """Connect, break, or deliver the due messages."""
        network = self._network
        if self._peer is not None and not self._peer.open:
            self._peer, self.news = None, Connection.LOST
            self._queue.clear()
            self._next_try = network.now + network.chance.randint(1, RECONNECT)
        there = network.inboxes.get(self.address)
        if self._peer is None:
            if not self.closed and there is not None and network.now >= self._next_try and self._passes(there):
                self._peer, self.news = there, Connection.UP
            return
        while self._queue and self._queue[0][0] <= network.now and self._passes(self._peer):
            if len(self._peer.arrived) >= QUEUE:
                break
            self._peer.arrived.append(self._queue.popleft()[1])

    def _passes(self, inbox: SimulatedInbox) -> bool:
        return not self._network.is_cut(self.owner, inbox.owner)


class Network:
    """All addresses and connections. Time is in ticks."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 0
        self.loss = 0.0
        """Share of messages that are lost on live connections."""
        self.fixed = False
        """Restarted processes reuse their addresses."""
        self.inboxes: dict[str, SimulatedInbox] = {}
        self.outboxes: list[SimulatedOutbox] = []
        self._cuts: dict[frozenset[str], int] = {}
        self._starts = 0

    def tick(self) -> None:
        self.now += 1
        for outbox in self.outboxes:
            outbox.tick()
        self.outboxes = [each for each in self.outboxes if not each.over]

    def cut(self, one: str, other: str, ticks: int) -> None:
        """Block the link between two processes for `ticks`."""
        self._cuts[frozenset((one, other))] = self.now + ticks

    def is_cut(self, one: str, other: str) -> bool:
        return self._cuts.get(frozenset((one, other)), 0) > self.now

    def new_incarnation(self) -> str:
        self._starts += 1
        return f"{self._starts:016x}"

    def listen(self, owner: str, address: str) -> SimulatedInbox:
        inbox = self.inboxes[address] = SimulatedInbox(self, owner, address)
        return inbox

    def dial(self, owner: str, address: str) -> SimulatedOutbox:
        outbox = SimulatedOutbox(self, owner, address)
        self.outboxes.append(outbox)
        return outbox


class SimulatedPoller(Poller):
    """Poller that never waits; it reports changes of connections."""

    def __init__(self, news: Callable[[], bool]) -> None:
        self._news = news

    def watch(self, connection: int) -> None: ...

    def unwatch(self, connection: int) -> None: ...

    def wait(self, seconds: float) -> bool:
        return self._news()

    def wake(self) -> None: ...

    def close(self) -> None: ...


class SimulatedSockets(Sockets):
    """Sockets of one incarnation of a process."""

    def __init__(self, network: Network, config: NodeConfig, incarnation: str) -> None:
        self._network = network
        self._owner = config.peer
        self._outboxes: dict[str, Outbox] = {}
        address = bind_address(config.listen, config.peer, incarnation, config.reach)
        self.inbox: SimulatedInbox = network.listen(config.peer, address)
        self.poller = SimulatedPoller(self._news)

    def _news(self) -> bool:
        return any(isinstance(each, SimulatedOutbox) and each.news for each in self._outboxes.values())

    def outbox(self, address: str, key: Role | None) -> Outbox:
        if address not in self._outboxes:
            self._outboxes[address] = self._network.dial(self._owner, address)
        return self._outboxes[address]

    def close(self) -> list[dict[str, int]]:
        counters = [self.drop(address, GOODBYE_TIME) for address in list(self._outboxes)]
        self.inbox.close()
        return counters

    def die(self) -> None:
        """Close the sockets as SIGKILL would."""
        for address in list(self._outboxes):
            self.drop(address)
        self.inbox.close()


class SimulatedResolver(Resolver):
    """Resolver that searches the simulated network instead of a directory."""

    def __init__(self, network: Network, specs: Mapping[str, Role | None]) -> None:
        super().__init__(specs)
        self._network = network

    def _resolve(self, specs: list[str]) -> dict[str, Role | None]:
        found: dict[str, Role | None] = {}
        for spec in specs:
            is_path = spec.startswith("ipc:")
            there = [each for each in self._network.inboxes if fnmatch.fnmatchcase(each, spec)] if is_path else [spec]
            found |= dict.fromkeys(there, self._roles[spec])
        return found


class SimulatedNode(NodeCore):
    """Real node core on the simulated network."""

    def __init__(
        self,
        network: Network,
        config: NodeConfig,
        union: UnionType | type[Message],
        status: Callable[[str], Heartbeat],
        answers: Mapping[type[Message], Answer] | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(config, union, status, answers, clock)
        self.incarnation = network.new_incarnation()
        self._make_sockets = functools.partial(SimulatedSockets, network)
        self._resolver = SimulatedResolver(network, config.specs)

    def die(self) -> None:
        """Close the sockets without a Goodbye."""
        if isinstance(self._sockets, SimulatedSockets):
            self._sockets.die()
