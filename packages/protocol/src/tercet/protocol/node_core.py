"""Core of a node: connects the peer table to the sockets, independent of the thread or loop that runs it."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import UnionType
from typing import NamedTuple, assert_never

import msgspec
import zmq

from tercet.protocol.__about__ import __version__
from tercet.protocol.config import NodeConfig
from tercet.protocol.errors import AddressError, DecodeError, ProtocolError
from tercet.protocol.logging import LinkCounters
from tercet.protocol.membership.events import Delivery, PeerDown, PeerInfo, PeerReady, PeerUp
from tercet.protocol.membership.heartbeat_timer import HeartbeatTimer, is_activity
from tercet.protocol.membership.links import Close, Effect, Refused, Send, Timing
from tercet.protocol.membership.peers import PeerTable
from tercet.protocol.messages.codec import Codec, Envelope, Frame, decode_envelope, encode, encode_envelope, tag_of
from tercet.protocol.messages.messages import Goodbye, Heartbeat, Hello, Introduce, Message, Ready
from tercet.protocol.messages.values import WIRE_VERSION, Phase, Role
from tercet.protocol.transport.channel import Bounds, Connection, Context, Inbox, Outbox, Received
from tercet.protocol.transport.endpoints import Resolver, address_towards, bind_address
from tercet.protocol.transport.peer_auth import EnvelopeCache, PeerAuthorizer
from tercet.protocol.transport.poller import Poller

logger = logging.getLogger(__name__)

GOODBYE_TIME = 0.2
"""Seconds that a Goodbye gets to leave before the sockets close."""

Answer = Callable[[str, Message], tuple[Message, *tuple[Frame, ...]] | None]
"""Function that replies to a message of a peer: returns the reply and its raw frames, or None."""


class Sockets:
    """Sockets of one node. They belong to one thread, except `counters`, `poller.wake` and sending.

    Raises ChannelError or AddressError.
    """

    def __init__(self, config: NodeConfig, incarnation: str) -> None:
        self._security = config.security
        self._bounds = Bounds(queue=config.queue)
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 8 * config.max_peers + 64)
        self._outboxes: dict[str, Outbox] = {}
        try:
            address = bind_address(config.listen, config.peer, incarnation, config.reach)
            self.inbox = Inbox(self._context, address, self._bounds, config.security)
        except ProtocolError:
            self._context.term()
            raise
        self.poller = Poller(self.inbox.filenos())

    def find(self, address: str) -> Outbox | None:
        """Return the outbox to an address, or None if it is not open."""
        return self._outboxes.get(address)

    def outbox(self, address: str, key: Role | None) -> Outbox:
        """Return the outbox to an address; a new one expects this role's key there.

        Raises AddressError, and ZMQError or OSError when descriptors run out.
        """
        if address not in self._outboxes:
            outbox = Outbox(self._context, address, self._bounds, self._security, key)
            try:
                self.poller.watch(outbox.monitor)
            except OSError:
                outbox.close()
                raise
            self._outboxes[address] = outbox
        return self._outboxes[address]

    def changes(self) -> Iterator[tuple[str, Connection]]:
        """Yield the addresses whose connections changed since the last call, with their last change."""
        for address, outbox in list(self._outboxes.items()):
            if (change := outbox.connection_change()) is not None:
                yield address, change

    def drop(self, address: str, linger: float = 0) -> dict[str, int]:
        """Close the outbox to an address, if there is one; return its counters."""
        outbox = self._outboxes.pop(address, None)
        if outbox is None:
            return {}
        self.poller.unwatch(outbox.monitor)
        outbox.close(linger)
        return outbox.counters

    def counters(self) -> list[dict[str, int]]:
        """Return the counters of every outbox. Thread-safe."""
        return [outbox.counters for outbox in list(self._outboxes.values())]

    def close(self) -> list[dict[str, int]]:
        """Close all sockets after a moment for queued messages to leave; return the counters of the outboxes."""
        counters = [self.drop(address, GOODBYE_TIME) for address in list(self._outboxes)]
        self.poller.close()
        self.inbox.close()
        self._context.term()
        return counters


def unanswered(source: str, message: Message) -> None:
    """Ignore a message: an `Answer` for messages that must not wake the main thread."""


class PeerRoute(NamedTuple):
    """Socket and envelope of a peer that is up."""

    outbox: Outbox
    envelope: bytes
    features: frozenset[str]


class NodeCore:
    """Links of a node. One thread (or loop) opens it, receives, ticks and closes; any thread may send.

    `status(peer)` returns the heartbeat for that peer; `answers` reply at once, and their messages are not delivered.
    Nothing a peer sends raises: unusable messages are counted, dropped, and logged at most once a second.
    """

    def __init__(
        self,
        config: NodeConfig,
        inbox_union: UnionType | type[Message],
        status: Callable[[str], Heartbeat],
        answers: Mapping[type[Message], Answer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.incarnation = os.urandom(8).hex()
        self._codec = Codec(inbox_union)
        self._status = status
        self._answers = dict(answers or {})
        self._clock = clock
        self._make_sockets: Callable[[NodeConfig, str], Sockets] = Sockets
        self._sockets: Sockets | None = None
        self._resolver = Resolver(config.specs)
        self._routes: dict[str, PeerRoute] = {}
        self._envelopes = EnvelopeCache()
        self._authorizer = PeerAuthorizer(config.security if config.requires_keys else None)
        self._counters = LinkCounters()
        self._heartbeat_timer = HeartbeatTimer(config.heartbeat_interval, config.silence)
        self._last_heartbeats: dict[str, Heartbeat] = {}
        """Last heartbeat to each peer that was up then."""
        self._due = float("-inf")
        self._connections_changed = False
        """Connections came up or broke since the last tick."""
        self._pending_ready: Ready | None = None

    # Any thread.

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Queue a message for a peer without waiting.

        Return False if it was not queued: the peer is down, its queue is full, or it did not announce this type.
        """
        route = self._routes.get(peer)
        if route is None:
            self._counters.count("refused_unknown")
            return False
        if tag_of(type(message)) not in route.features:
            self._counters.count("refused_unannounced")
            return False
        if is_activity(message):
            self._note_activity(self._clock())
        return route.outbox.send([route.envelope, encode(message), *frames])

    def set_ready(self, ready: Ready) -> None:
        """Tell every peer, now and later, that this process can take work."""
        self._pending_ready = ready
        self.wake()

    def wake(self) -> None:
        """Make a `wait` return."""
        if sockets := self._sockets:
            sockets.poller.wake()

    @property
    def heartbeat_due(self) -> float:
        """Time of the next heartbeat."""
        return self._heartbeat_timer.due

    def repeat_heartbeats(self, step_age: float, longest_step: float) -> None:
        """Repeat the last heartbeats with this step age, while the thread that owns the node is busy."""
        for peer, last in list(self._last_heartbeats.items()):
            phase = last.phase if last.phase is Phase.DRAINING else Phase.STEP
            age = {"phase": phase, "step_age": step_age, "longest_step": longest_step}
            self.send(peer, msgspec.structs.replace(last, **age))

    @property
    def counters(self) -> dict[str, int]:
        """Counts of messages sent, received, refused and dropped.

        `refused_full`, `refused_unknown`, `refused_unannounced`, `refused_oversized`: not sent, by reason.
        `dropped_undecodable`: garbage, unknown tags, missing frames; `dropped_stale`: meant for an earlier start of
        this process; `dropped_unknown`: from a process that is no peer; `dropped_forbidden`: with another role's key
        than the peer's. `turned_away`: connections without a key. `refused_hello`: Hellos and introductions of
        processes that cannot be peers, or that have ended.
        """
        return self._counters.total(self._sockets.counters() if self._sockets else ())

    def peers(self) -> list[PeerInfo]:
        """Return the peers that are up."""
        table = list(self.table.peers.values())
        return [PeerInfo(peer.hello.peer, peer.hello.role, peer.hello.incarnation, peer.ready) for peer in table]

    # The thread that owns the node.

    def open(self) -> None:
        """Bind the inbox. Raises ChannelError or AddressError."""
        config = self.config
        self._sockets = self._make_sockets(config, self.incarnation)
        self.inbox = self._sockets.inbox
        me = Hello(
            peer=config.peer,
            incarnation=self.incarnation,
            role=config.role,
            address=config.advertise or self.inbox.address,
            version=WIRE_VERSION,
            features=list(self._codec.tags),
            software=f"tercet-protocol {__version__}",
        )
        self.table = PeerTable(me, Timing(config.heartbeat_interval, config.silence), config.max_peers, config.reach)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` would not wait."""
        return self._open_sockets.poller.fileno()

    def wait(self, seconds: float) -> None:
        """Wait until there is something to receive or to do. Receive until nothing is left before the next call."""
        self._connections_changed |= self._open_sockets.poller.wait(seconds)

    def receive(self, limit: int) -> tuple[list[Delivery], bool]:
        """Receive at most `limit` messages; return their deliveries and whether there may be more."""
        deliveries: list[Delivery] = []
        now = self._clock()
        self.admit()
        for _ in range(limit):
            received = self.inbox.receive()
            if received is None:
                return deliveries, False
            self._receive_one(received, now, deliveries)
        return deliveries, True

    def admit(self) -> None:
        """Authenticate waiting connections, and count those without a key."""
        for _ in range(self.inbox.admit()):
            self._counters.count("turned_away")
            self._counters.warn("refused a connection: its key is none of this server's", self._clock())

    def tick(self) -> list[Delivery]:
        """Do what is due: resolve specs, send Hellos, detect dead peers, send heartbeats."""
        deliveries: list[Delivery] = []
        now = self._clock()
        if now < self._next_due and not self._connections_changed and self._pending_ready is None:
            return deliveries
        # Apply each effect before the next input: a peer must be down before its next incarnation comes up.
        if self._pending_ready is not None:
            self._apply(self.table.set_ready(self._pending_ready), now, deliveries)
            self._pending_ready = None
        if (addresses := self._resolver.poll(now)) is not None:
            self._authorizer.dialled = addresses
            self._apply(self.table.dial(set(addresses), now), now, deliveries)
        if self._connections_changed:
            self._connections_changed = False
            self._apply(self._connections(now), now, deliveries)
        self._apply(self.table.tick(now), now, deliveries)
        self.send_heartbeats()
        self._due = min(self.table.deadline(now), self._resolver.deadline)
        return deliveries

    def _connections(self, now: float) -> list[Effect]:
        """Return the effects of connections that came up, broke or failed."""
        effects: list[Effect] = []
        for address, change in self._open_sockets.changes():
            if change is Connection.FAILED:
                self._counters.warn(
                    f"connection failed address={address}: it does not accept our key, or is no Tercet process", now
                )
                effects += self.table.on_connection_failed(address, now)
            else:
                effects += self.table.on_connection(address, change is Connection.UP, now)
        return effects

    def send_heartbeats(self) -> None:
        """Send heartbeats if they are due."""
        now = self._clock()
        if now < self._heartbeat_timer.due:
            return
        self._heartbeat_timer.sent(now)
        self._last_heartbeats = {peer: self._status(peer) for peer in list(self._routes)}
        for peer, heartbeat in self._last_heartbeats.items():
            self.send(peer, heartbeat)

    def _note_activity(self, now: float) -> None:
        """Record activity, here or at a peer, so that heartbeats are frequent for a while."""
        if self._heartbeat_timer.note_activity(now):
            self.wake()

    @property
    def _next_due(self) -> float:
        return min(self._due, self._heartbeat_timer.due)

    def idle_time(self) -> float:
        """Return the seconds until the next tick has something to do, if nothing happens before."""
        return max(0.0, self._next_due - self._clock())

    def close(self, reason: str) -> None:
        """Send Goodbye and close every socket; wait briefly for queued messages to leave."""
        if self._sockets is None:
            return
        self._apply(self.table.leave(reason), self._clock(), [])
        self._routes.clear()
        sockets, self._sockets = self._sockets, None
        for counters in sockets.close():
            self._counters.add(counters)

    @property
    def _open_sockets(self) -> Sockets:
        assert self._sockets is not None, "the node is not open"
        return self._sockets

    # Receiving.

    def _receive_one(self, received: Received, now: float, deliveries: list[Delivery]) -> None:
        key, frames = received
        try:
            if len(frames) < 2:
                raise DecodeError(f"{len(frames)} frames instead of an envelope and a message")
            source = self._envelopes.find(key, bytes(frames[0]))
            source = source or self._handle_unknown_sender(decode_envelope(frames[0]), received, now, deliveries)
            if source is None:
                return
            message = self._codec.decode(frames[1])
            self._counters.count("received")
            self.table.note_message(source, now)
            self._handle(source, message, received, now, deliveries)
        except DecodeError as error:
            self._counters.drop("dropped_undecodable", f"message: {error}", now)

    def _handle_unknown_sender(
        self, envelope: Envelope, received: Received, now: float, deliveries: list[Delivery]
    ) -> str | None:
        """Handle an envelope that is not cached; return the peer if it is one that is up."""
        if envelope.target and envelope.target != self.incarnation:
            self._counters.drop(
                "dropped_stale", f"message source={envelope.source}: meant for an earlier incarnation", now
            )
            return None
        key, frames = received
        known = self.table.peers.get(envelope.source)
        if known and envelope.target and known.hello.incarnation == envelope.incarnation:
            if self._forbidden(key, envelope.source, known.hello.role, now):
                return None
            self._envelopes.add(key, bytes(frames[0]), envelope.source)
            return envelope.source
        message = self._codec.decode(frames[1])
        if isinstance(message, Hello):
            if (message.peer, message.incarnation) != (envelope.source, envelope.incarnation):
                raise DecodeError(f"a Hello of {message.peer} in an envelope of {envelope.source}")
            self._apply(self._handle_hello(key, message, now), now, deliveries)
        elif isinstance(message, Goodbye) and envelope.target:
            logger.warning("peer %s refused this process: %s", envelope.source, message.reason)
        else:
            self._counters.drop("dropped_unknown", f"message source={envelope.source}: not a connected peer", now)
        return None

    def _forbidden(self, key: Role | None, peer: str, role: Role, now: float, address: str = "") -> bool:
        """Return whether the sender's key does not allow its role, or the address at which another role is expected."""
        if self._authorizer.allowed(key, role, address):
            return False
        place = f" address={address}" if address else ""
        claim = f"claims role={role.value}{place} with key={key.value if key else 'none'}"
        self._counters.drop("dropped_forbidden", f"message source={peer}: {claim}", now)
        return True

    def _handle_hello(self, key: Role | None, hello: Hello, now: float) -> list[Effect]:
        """Handle a Hello; the reply is sent to a socket that expects the key which the Hello came with."""
        if self._forbidden(key, hello.peer, hello.role, now, hello.address):
            return []
        role = key or hello.role
        effects = self.table.handle_hello(hello, now)
        link = self.table.links.get(hello.address)
        if link is None or link.hello is not hello:
            return effects
        if (outbox := self._open_sockets.find(hello.address)) and outbox.key not in {None, role}:
            self._close(hello.address)
        return self._expect(role, hello.address, effects)

    def _expect(self, role: Role, address: str, effects: list[Effect]) -> list[Effect]:
        """Expect a key at an address if there is a link to it."""
        if address in self.table.links:
            self._authorizer.expect(role, address)
        return effects

    def _handle(
        self, source: str, message: Message, received: Received, now: float, deliveries: list[Delivery]
    ) -> None:
        match message:
            case Hello():
                if message.peer != source:
                    raise DecodeError(f"a Hello of {message.peer} in an envelope of {source}")
                effects = self._handle_hello(received.role, message, now)
            case Introduce():
                key = self._authorizer.key_at(message.address) or message.role
                effects = self._expect(key, message.address, self.table.handle_introduce(source, message, now))
            case Ready():
                effects = self.table.handle_ready(source, message)
            case Goodbye():
                effects = self.table.handle_goodbye(source, message, now)
            case _:
                if is_activity(message):
                    self._note_activity(now)
                if answer := self._answers.get(type(message)):
                    if reply := answer(source, message):
                        self.send(source, *reply)
                else:
                    deliveries.append(Delivery(source, message, tuple(map(memoryview, received.frames[2:])), now))
                return
        self._apply(effects, now, deliveries)

    # Effects of the table.

    def _apply(self, effects: Iterable[Effect], now: float, deliveries: list[Delivery]) -> None:
        todo = deque(effects)
        if todo:
            self._due = float("-inf")
        while todo:
            match todo.popleft():
                case Send() as send:
                    todo.extendleft(reversed(self.table.send_result(send, self._send(send), now)))
                case Close(address):
                    self._close(address)
                    if address not in self.table.links:
                        self._authorizer.forget(address)
                case Refused(peer, reason, again):
                    self._counters.count("refused_hello")
                    logger.log(logging.DEBUG if again else logging.ERROR, "refused peer %s: %s", peer, reason)
                case PeerUp(peer=peer, features=features) as event:
                    hello = self.table.peers[peer].hello
                    if outbox := self._dial(hello.address):
                        self._routes[peer] = PeerRoute(outbox, self._envelope(hello.incarnation), frozenset(features))
                    else:
                        todo.extendleft(reversed(self.table.on_connection(hello.address, False, now)))
                    deliveries.append(Delivery(peer, event))
                    self._note_activity(now)
                case PeerReady(peer=peer) as event:
                    deliveries.append(Delivery(peer, event))
                case PeerDown(peer=peer) as event:
                    self._routes.pop(peer, None)
                    self._envelopes.forget(peer)
                    deliveries.append(Delivery(peer, event))
                    self._note_activity(now)
                case other:
                    assert_never(other)

    def _send(self, send: Send) -> bool:
        message = send.message
        if isinstance(message, Hello) and not self.config.advertise:
            try:
                here = address_towards(send.address, self.inbox.address)
            except AddressError as error:
                self._counters.warn(str(error), self._clock())
                return False
            message = msgspec.structs.replace(message, address=here)
        outbox = self._dial(send.address)
        return outbox is not None and outbox.send([self._envelope(send.target), encode(message)])

    def _envelope(self, target: str) -> bytes:
        return encode_envelope(Envelope(source=self.config.peer, incarnation=self.incarnation, target=target))

    def _dial(self, address: str) -> Outbox | None:
        """Return the outbox to an address, or None if none can be opened now, for example without free descriptors."""
        try:
            return self._open_sockets.outbox(address, self._authorizer.key_at(address))
        except (AddressError, OSError, zmq.ZMQError) as error:
            self._counters.warn(f"cannot connect address={address}: {error}", self._clock())
            return None

    def _close(self, address: str) -> None:
        self._counters.add(self._open_sockets.drop(address))
