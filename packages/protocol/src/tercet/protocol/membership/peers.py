"""Peer table: a state machine that decides which peers are up, which addresses to dial, and which messages to send.

The table has no socket and no clock. Every call takes `now` and returns effects in the order in which they must happen;
the node carries them out and reports with `send_result` whether each `Send` succeeded.
"""

from dataclasses import dataclass, field

import msgspec

from tercet.protocol.errors import AddressError, IncompatiblePeer
from tercet.protocol.membership.events import PeerDown, PeerReady, PeerUp
from tercet.protocol.membership.links import FIRST_PAUSE, Close, Effect, Link, LinkState, Peer, Refused, Send, Timing
from tercet.protocol.messages.messages import Goodbye, Hello, Introduce, Ready
from tercet.protocol.messages.values import WIRE_VERSION, Role
from tercet.protocol.transport.endpoints import Reach, check_dialable, check_peer_id

REFUSED_PAUSE = 10.0
"""Seconds until the address of a refused peer is dialled again; another process may listen there by then."""
FAILED_PAUSE = 1.0
"""Seconds until an address that refused our key is dialled again; it may be restarted with other keys."""
INTRODUCED_TIME = 10.0
"""Seconds for which an introduced address is dialled without an answer. Frontends repeat introductions, so addresses
of dead peers expire."""
UNSENT_TIME = 10.0
"""Seconds without a successful Hello after which the socket is replaced: ZeroMQ gives up some connections silently."""

_WITHOUT_HELLO = {LinkState.UP, LinkState.ALIAS}
"""States in which no Hello is due."""
_INTRODUCED = {Role.SCHEDULER: Role.DETOKENIZER, Role.DETOKENIZER: Role.SCHEDULER}
"""Roles that a frontend introduces to each other."""


def check_hello(hello: Hello, reach: Reach) -> None:
    """Refuse a Hello: AddressError for an impossible id or address, IncompatiblePeer for another major version."""
    check_peer_id(hello.peer)
    check_dialable(hello.address, reach)
    if hello.version[0] != WIRE_VERSION[0]:
        ours, theirs = (".".join(map(str, version)) for version in (WIRE_VERSION, hello.version))
        raise IncompatiblePeer(f"{hello.peer} speaks wire version {theirs}, this part speaks {ours}")


def should_introduce(one: Role, other: Role) -> bool:
    """Return whether a frontend introduces peers of these roles to each other."""
    return _INTRODUCED.get(one) == other


@dataclass
class PeerTable:
    """State of all links and peers of one process. `me` is this node's Hello, without `reply`."""

    me: Hello
    timing: Timing = field(default_factory=Timing)
    max_peers: int = 1024
    reach: Reach = Reach.LOOPBACK
    ready: Ready | None = None
    peers: dict[str, Peer] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    targets: set[str] = field(default_factory=set)
    _refused: dict[str, str] = field(default_factory=dict)
    _last_incarnations: dict[tuple[str, Role], str] = field(default_factory=dict)
    """Last incarnation of each peer that was up."""
    _ended: dict[str, None] = field(default_factory=dict)
    """Incarnations that have ended; their late messages are ignored."""
    _last_tick: float | None = None
    _introduced_at: float = 0.0

    # Inputs from the node.

    def dial(self, addresses: set[str], now: float) -> list[Effect]:
        """Dial these addresses, and stop dialling those of the previous call that are not among them."""
        effects: list[Effect] = []
        for address in sorted(self.targets - addresses):
            link = self.links.get(address)
            if link and link.state in {LinkState.DIALLING, LinkState.ALIAS} and link.expires is None:
                effects += self._drop_link(link)
        self.targets = addresses - {self.me.address}
        for address in sorted(self.targets):
            link = self.links.setdefault(address, Link(address, LinkState.DIALLING, now))
            if link.state is LinkState.DIALLING:
                link.expires = None
        return effects + self._due_hellos(now)

    def handle_introduce(self, source: str, message: Introduce, now: float) -> list[Effect]:
        """Dial a peer that a frontend introduced; ignore other introducers, and roles that do not talk."""
        introducer = self.peers.get(source)
        if (
            introducer is None
            or introducer.hello.role is not Role.FRONTEND
            or not should_introduce(self.me.role, message.role)
        ):
            return []
        try:
            address = check_dialable(message.address, self.reach)
            check_peer_id(message.peer)
        except AddressError as error:
            return [Refused(message.peer, f"introduced by {source}: {error}")]
        link = self.links.get(address)
        if link is None:
            if len(self.links) >= 2 * self.max_peers:
                return []
            link = self.links[address] = Link(address, LinkState.DIALLING, now)
        if link.state is LinkState.DIALLING and address not in self.targets:
            link.expires = now + INTRODUCED_TIME
        return self._due_hellos(now)

    def handle_hello(self, hello: Hello, now: float) -> list[Effect]:
        """Handle a Hello whose envelope names the same peer and incarnation."""
        if hello.peer == self.me.peer and hello.incarnation == self.me.incarnation:
            return []
        try:
            self._check_free(hello)
            check_hello(hello, self.reach)
        except AddressError as error:
            return self._note_refusal(hello, str(error))
        except IncompatiblePeer as error:
            return self._refuse(hello, str(error), now)
        if hello.incarnation in self._ended:
            return self._note_refusal(hello, "a later start of it has taken its place")
        known = self.peers.get(hello.peer)
        if known and known.hello.incarnation == hello.incarnation:
            known.last_message = now
            if hello.reply:
                return self._mark_alias(hello)
            return [self._make_reply(known.hello), *self._send_ready(known)]
        if known is None and len(self.peers) >= self.max_peers:
            return self._refuse(hello, f"{self.me.peer} has {self.max_peers} peers already", now)
        effects = self._take_over_address(hello, now)
        link = self.links.get(hello.address)
        if link is None:
            if len(self.links) >= 2 * self.max_peers:
                return effects
            link = self.links[hello.address] = Link(hello.address, LinkState.DIALLING, now)
        if hello.reply and link.hello_sent:
            return effects + self._bring_up(link, hello, now)
        if link.state is not LinkState.ANSWERING or link.hello is None or link.hello.incarnation != hello.incarnation:
            link.state, link.next_try, link.pause = LinkState.ANSWERING, now, FIRST_PAUSE
            link.expires = now + self.timing.silence
        link.hello = hello
        return effects + self._due_hellos(now)

    def send_result(self, send: Send, ok: bool, now: float) -> list[Effect]:
        """Handle the result of a `Send`. Only messages that must be repeated or lead to a next step matter."""
        if isinstance(send.message, Ready):
            for peer in self.peers.values():
                if peer.hello.address == send.address:
                    peer.ready_sent_at = now if ok else None
            return []
        link = self.links.get(send.address)
        if link is None or not isinstance(send.message, Hello):
            return []
        if not ok:
            link.next_try = now + link.pause
            link.pause = min(2 * link.pause, self.timing.interval)
            return self._renew_socket(link, now)
        link.hello_sent, link.unsent_since = True, None
        link.next_try, link.pause = now + self.timing.interval, FIRST_PAUSE
        if link.state is LinkState.ANSWERING and link.hello and send.message.reply:
            return self._bring_up(link, link.hello, now)
        if link.state is LinkState.REFUSING and link.hello:
            goodbye = Send(link.address, link.hello.incarnation, Goodbye(reason=link.reason))
            return [goodbye, *self._reset_link(link, now)]
        return []

    def note_message(self, source: str, now: float) -> None:
        """Note that a message came from a peer that is up."""
        self.peers[source].last_message = now

    def handle_ready(self, source: str, ready: Ready) -> list[Effect]:
        """Handle a peer's Ready; a repetition has no effect."""
        peer = self.peers[source]
        if peer.ready == ready:
            return []
        peer.ready = ready
        return [PeerReady(source, peer.hello.role, ready)]

    def handle_goodbye(self, source: str, message: Goodbye, now: float) -> list[Effect]:
        """Handle a peer's Goodbye: the incarnation has ended for good."""
        self._mark_ended(self.peers[source].hello.incarnation)
        return self._take_down(self.peers[source], f"goodbye: {message.reason}", now)

    def on_connection(self, address: str, up: bool, now: float) -> list[Effect]:
        """Handle a connection that came up or broke."""
        link = self.links.get(address)
        if link and up and link.state is not LinkState.UP:
            link.next_try = min(link.next_try, now)
        for peer in self.peers.values():
            if peer.hello.address == address:
                peer.lost_at = None if up else peer.lost_at or now
        return self._due_hellos(now)

    def on_connection_failed(self, address: str, now: float) -> list[Effect]:
        """Handle an address that refuses our key or is no peer: retry later with a new socket."""
        if link := self.links.get(address):
            link.next_try = now + FAILED_PAUSE
        return [Close(address)]

    def set_ready(self, ready: Ready) -> list[Effect]:
        """Send our Ready to all peers, and to later ones."""
        self.ready = ready
        return [effect for peer in self.peers.values() for effect in self._send_ready(peer)]

    def tick(self, now: float) -> list[Effect]:
        """Detect dead peers, repeat messages that are due, and expire links.

        After a gap in which this process did not run, no peer counts as silent, since messages were not read. Peers may
        have given this process up in the meantime: a Hello to each of them shows that it lives.
        """
        timing = self.timing
        effects: list[Effect] = []
        if self._last_tick is not None and now - self._last_tick > timing.silence / 2:
            for peer in self.peers.values():
                peer.last_message = now
                effects.append(self._make_hello(peer.hello.address, peer.hello.incarnation))
        self._last_tick = now
        for peer in list(self.peers.values()):
            if peer.lost_at is not None and now - peer.lost_at > timing.reconnect:
                effects += self._take_down(peer, "its connection broke", now)
            elif now - peer.last_message > timing.silence:
                effects += self._take_down(peer, f"silent for {now - peer.last_message:.1f} s", now)
            elif self.ready and (peer.ready_sent_at is None or now - peer.ready_sent_at > timing.silence):
                effects += self._send_ready(peer)
        if now - self._introduced_at > timing.silence:
            self._introduced_at = now
            for peer in self.peers.values():
                effects += self._introduce_all(peer, both_ways=False)
        for link in list(self.links.values()):
            if link.expires is not None and now > link.expires and link.state is not LinkState.UP:
                if link.state is LinkState.ANSWERING and link.hello and link.address.startswith("tcp:"):
                    effects += self._note_refusal(link.hello, f"nobody answers at {link.address}, its address")
                effects += self._reset_link(link, now)
        return effects + self._due_hellos(now)

    def deadline(self, now: float) -> float:
        """Return the time of the next `tick` if nothing happens before; periodic work does not set it."""
        timing = self.timing
        times = [link.next_try for link in self.links.values() if link.state not in _WITHOUT_HELLO]
        times += [link.expires for link in self.links.values() if link.expires and link.state is not LinkState.UP]
        for peer in self.peers.values():
            times.append(
                peer.last_message + timing.silence if peer.lost_at is None else peer.lost_at + timing.reconnect
            )
            if self.ready and peer.ready_sent_at is None:
                times.append(now + timing.ready_retry)
        return min(times, default=float("inf"))

    def leave(self, reason: str) -> list[Effect]:
        """Return a Goodbye to every peer."""
        goodbye = Goodbye(reason=reason)
        return [Send(peer.hello.address, peer.hello.incarnation, goodbye) for peer in self.peers.values()]

    # State transitions.

    def _due_hellos(self, now: float) -> list[Effect]:
        """Return the Hellos that are due."""
        effects: list[Effect] = []
        for link in self.links.values():
            if link.state in _WITHOUT_HELLO or link.next_try > now:
                continue
            link.next_try = now + self.timing.interval
            effects.append(self._make_reply(link.hello) if link.hello else self._make_hello(link.address))
        return effects

    def _make_hello(self, address: str, incarnation: str = "") -> Send:
        return Send(address, incarnation, msgspec.structs.replace(self.me, dialled=address))

    def _make_reply(self, hello: Hello) -> Send:
        reply = msgspec.structs.replace(self.me, reply=True, dialled=hello.dialled)
        return Send(hello.address, hello.incarnation, reply)

    def _bring_up(self, link: Link, hello: Hello, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if old := self.peers.get(hello.peer):
            effects += self._take_down(old, "replaced by a new incarnation", now)
        if (before := self._last_incarnations.get((hello.peer, hello.role), hello.incarnation)) != hello.incarnation:
            self._mark_ended(before)
        if len(self._last_incarnations) >= 4 * self.max_peers:
            ups = [known.hello for known in self.peers.values()]
            self._last_incarnations = {(each.peer, each.role): each.incarnation for each in ups}
        self._last_incarnations[hello.peer, hello.role] = hello.incarnation
        link.state, link.hello, link.expires = LinkState.UP, hello, None
        peer = self.peers[hello.peer] = Peer(hello, now, frozenset(hello.features))
        effects.append(PeerUp(hello.peer, hello.role, hello.incarnation, hello.features))
        return effects + self._send_ready(peer) + self._introduce_all(peer, both_ways=True)

    def _take_down(self, peer: Peer, reason: str, now: float) -> list[Effect]:
        """Close the link of a peer and report PeerDown; its address is dialled again while it is a target."""
        hello = peer.hello
        del self.peers[hello.peer]
        effects = self._reset_link(self.links[hello.address], now)
        for link in list(self.links.values()):
            if link.state is LinkState.ALIAS and link.hello and link.hello.incarnation == hello.incarnation:
                effects += self._reset_link(link, now)
        return [*effects, PeerDown(hello.peer, hello.role, reason)]

    def _mark_alias(self, hello: Hello) -> list[Effect]:
        """Stop dialling another address of a peer that is up and has answered from its own address."""
        link = self.links.get(hello.dialled)
        if (
            hello.dialled == hello.address
            or link is None
            or not link.hello_sent
            or link.state is not LinkState.DIALLING
        ):
            return []
        link.state, link.hello, link.expires = LinkState.ALIAS, hello, None
        return [Close(link.address)]

    def _mark_ended(self, incarnation: str) -> None:
        self._ended[incarnation] = None
        if len(self._ended) > 4 * self.max_peers:
            del self._ended[next(iter(self._ended))]

    def _check_free(self, hello: Hello) -> None:
        """Raise AddressError while another peer is up at this address, or with this name in another role.

        A Hello alone proves neither. The sender repeats it, and gets address and name once the other peer is down.
        """
        link, named = self.links.get(hello.address), self.peers.get(hello.peer)
        if link and link.state is LinkState.UP and link.hello and link.hello.peer != hello.peer:
            raise AddressError(f"{link.hello.peer} is still up at {hello.address}")
        if named and named.hello.role is not hello.role:
            raise AddressError(f"a {named.hello.role.value} of that name is still up")

    def _take_over_address(self, hello: Hello, now: float) -> list[Effect]:
        """Take down an earlier incarnation at the same address: two processes cannot listen there."""
        known = self.peers.get(hello.peer)
        if known is None or known.hello.address != hello.address:
            return []
        return self._take_down(known, "another process took its address", now)

    def _reset_link(self, link: Link, now: float) -> list[Effect]:
        """Close a link's socket, and dial again if its address is a target; after a refusal with a longer pause."""
        effects = self._drop_link(link)
        if link.address in self.targets:
            pause = REFUSED_PAUSE if link.state is LinkState.REFUSING else self.timing.interval
            self.links[link.address] = Link(link.address, LinkState.DIALLING, now + pause)
        return effects

    def _renew_socket(self, link: Link, now: float) -> list[Effect]:
        """Replace the socket if no Hello could be sent for `UNSENT_TIME`."""
        if link.unsent_since is None or link.state is LinkState.UP:
            link.unsent_since = now
        if now - link.unsent_since < UNSENT_TIME:
            return []
        link.unsent_since = None
        return [Close(link.address)]

    def _drop_link(self, link: Link) -> list[Effect]:
        del self.links[link.address]
        return [Close(link.address)]

    def _refuse(self, hello: Hello, reason: str, now: float) -> list[Effect]:
        """Answer with a Hello that shows the version, then send the reason and close. A reply gets no answer."""
        effects = self._take_over_address(hello, now) + self._note_refusal(hello, reason)
        link = self.links.get(hello.address) or Link(hello.address, LinkState.DIALLING, now)
        link.state, link.hello, link.reason, link.next_try = LinkState.REFUSING, hello, reason, now
        link.expires = now + self.timing.silence
        if hello.reply:
            return effects + (self._reset_link(link, now) if hello.address in self.links else [])
        if len(self.links) < 2 * self.max_peers:
            self.links[hello.address] = link
        return effects + self._due_hellos(now)

    def _note_refusal(self, hello: Hello, reason: str) -> list[Effect]:
        """Report a refusal once per incarnation."""
        if self._refused.get(hello.peer) == hello.incarnation:
            return [Refused(hello.peer, reason, again=True)]
        if len(self._refused) >= self.max_peers:
            self._refused.clear()
        self._refused[hello.peer] = hello.incarnation
        return [Refused(hello.peer, reason)]

    def _send_ready(self, peer: Peer) -> list[Effect]:
        return [Send(peer.hello.address, peer.hello.incarnation, self.ready)] if self.ready else []

    def _introduce_all(self, peer: Peer, *, both_ways: bool) -> list[Effect]:
        """Introduce a peer to those it should talk to, and with `both_ways` them to it. Only frontends introduce."""
        if self.me.role is not Role.FRONTEND:
            return []
        effects: list[Effect] = []
        for other in self.peers.values():
            if should_introduce(peer.hello.role, other.hello.role):
                effects.append(_introduction(peer, other))
                if both_ways:
                    effects.append(_introduction(other, peer))
        return effects


def _introduction(listener: Peer, subject: Peer) -> Send:
    hello = subject.hello
    message = Introduce(peer=hello.peer, role=hello.role, address=hello.address)
    return Send(listener.hello.address, listener.hello.incarnation, message)
