"""Simulated network of peer tables, without sockets or clocks."""

from collections.abc import Callable
from itertools import count

from tercet.protocol.membership.events import PeerDown, PeerEvent, PeerReady, PeerUp
from tercet.protocol.membership.links import Close, Effect, Refused, Send
from tercet.protocol.membership.peers import PeerTable
from tercet.protocol.messages.messages import Goodbye, Hello, Introduce, Ready
from tercet.protocol.messages.values import Role

START = 1000.0
_incarnations = count(1)


def hello(role: Role, peer: str = "", address: str = "", version: tuple[int, int] = (1, 0)) -> Hello:
    """Return the Hello of a new start of a process; every call makes another incarnation."""
    incarnation, peer = f"{next(_incarnations):016x}", peer or f"{role.value}-0"
    return Hello(
        peer=peer,
        incarnation=incarnation,
        role=role,
        address=address or f"ipc:///run/{peer}.{incarnation}.ipc",
        version=version,
        features=["Hello", "Heartbeat"],
    )


class World:
    """Peer tables that exchange messages through a medium that drops those chosen by `lose`. A step is 50 ms."""

    def __init__(self) -> None:
        self.now = START
        self.tables: dict[str, PeerTable] = {}
        self.events: dict[str, list[PeerEvent | Refused]] = {}
        self.closed: list[str] = []
        self.refused_again = 0
        self.sent: list[Send] = []
        self.mail: list[tuple[PeerTable, Send]] = []
        self.lose: Callable[[Send], bool] = lambda _: False
        self.mute: set[str] = set()
        """Addresses whose process reads but never answers."""

    def start(self, role: Role, peer: str = "", *, dial: tuple[str, ...] = (), address: str = "") -> PeerTable:
        table = PeerTable(hello(role, peer, address))
        self.tables[table.me.address] = table
        self.events[table.me.incarnation] = []
        self.apply(table, table.dial(set(dial), self.now))
        return table

    def kill(self, table: PeerTable) -> None:
        del self.tables[table.me.address]

    def apply(self, table: PeerTable, effects: list[Effect]) -> None:
        todo = list(effects)
        while todo:
            match todo.pop(0):
                case Send() as send:
                    self.sent.append(send)
                    reached = send.address in self.tables.keys() | self.mute
                    if reached and not self.lose(send):
                        self.mail.append((table, send))
                    todo = table.send_result(send, reached, self.now) + todo
                case Close(address):
                    self.closed.append(address)
                case Refused(again=True):
                    self.refused_again += 1
                case event:
                    self.events[table.me.incarnation].append(event)

    def deliver(self) -> None:
        while self.mail:
            sender, send = self.mail.pop(0)
            table = self.tables.get(send.address)
            if table is None or send.target not in {"", table.me.incarnation}:
                continue
            known = table.peers.get(sender.me.peer)
            up = known is not None and known.hello.incarnation == sender.me.incarnation
            match send.message:
                case Hello() as message:
                    self.apply(table, table.handle_hello(message, self.now))
                case Introduce() as message if up:
                    self.apply(table, table.handle_introduce(sender.me.peer, message, self.now))
                case Ready() as message if up:
                    self.apply(table, table.handle_ready(sender.me.peer, message))
                case Goodbye() as message if up:
                    self.apply(table, table.handle_goodbye(sender.me.peer, message, self.now))
            if up and sender.me.peer in table.peers:
                table.note_message(sender.me.peer, self.now)

    def run(self, seconds: float, *, beats: bool = True) -> None:
        """Advance the time; with `beats`, all peers exchange heartbeats meanwhile."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            for table in list(self.tables.values()):
                self.apply(table, table.tick(self.now))
                self.deliver()
                for peer in table.peers.values() if beats else ():
                    other = self.tables.get(peer.hello.address)
                    mine = other.peers.get(table.me.peer) if other else None
                    if mine and mine.hello.incarnation == table.me.incarnation:
                        mine.last_message = self.now

    def log(self, table: PeerTable) -> list[str]:
        """Return the events of a table since the last call, as text."""
        events = self.events[table.me.incarnation]
        lines = [_words(event) for event in events]
        events.clear()
        return lines


def _words(event: PeerEvent | Refused) -> str:
    match event:
        case PeerUp(peer, role):
            return f"{peer} up as {role.value}"
        case PeerReady(peer):
            return f"{peer} ready"
        case PeerDown(peer, _, reason):
            return f"{peer} down: {reason}"
        case Refused(peer, reason):
            return f"{peer} refused: {reason}"
