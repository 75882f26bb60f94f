"""The table of peers, in worlds without sockets or clocks: messages in, effects out."""

from collections.abc import Callable
from itertools import count

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tercet.protocol.events import PeerDown, PeerEvent, PeerReady, PeerUp
from tercet.protocol.links import Close, Effect, Refused, Say
from tercet.protocol.messages import Goodbye, Hello, Introduce, Ready
from tercet.protocol.peers import INTRODUCED_TIME, REFUSED_PAUSE, PeerTable
from tercet.protocol.values import Role

START = 1000.0
FRONTEND, SCHEDULER, DETOKENIZER = Role.FRONTEND, Role.SCHEDULER, Role.DETOKENIZER
_incarnations = count(1)


def hello(role: Role, peer: str = "", address: str = "", version: tuple[int, int] = (1, 0)) -> Hello:
    """What a new start of a process says; every call is another incarnation."""
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
    """Tables that talk, by a medium that loses what `lose` says. Time moves in steps of 50 ms."""

    def __init__(self) -> None:
        self.now = START
        self.tables: dict[str, PeerTable] = {}
        self.events: dict[str, list[PeerEvent | Refused]] = {}
        self.closed: list[str] = []
        self.said: list[Say] = []
        self.mail: list[tuple[PeerTable, Say]] = []
        self.lose: Callable[[Say], bool] = lambda _: False
        self.mute: set[str] = set()
        """Addresses where somebody listens but never speaks."""

    def start(self, role: Role, peer: str = "", *, dial: tuple[str, ...] = (), address: str = "") -> PeerTable:
        table = PeerTable(hello(role, peer, address))
        self.tables[table.me.address] = table
        self.events[table.me.incarnation] = []
        self.apply(table, table.want(set(dial), self.now))
        return table

    def kill(self, table: PeerTable) -> None:
        del self.tables[table.me.address]

    def apply(self, table: PeerTable, effects: list[Effect]) -> None:
        todo = list(effects)
        while todo:
            match todo.pop(0):
                case Say() as say:
                    self.said.append(say)
                    reached = say.address in self.tables.keys() | self.mute
                    if reached and not self.lose(say):
                        self.mail.append((table, say))
                    todo = table.said(say, reached, self.now) + todo
                case Close(address):
                    self.closed.append(address)
                case event:
                    self.events[table.me.incarnation].append(event)

    def deliver(self) -> None:
        while self.mail:
            sender, say = self.mail.pop(0)
            table = self.tables.get(say.address)
            if table is None or say.target not in {"", table.me.incarnation}:
                continue
            known = table.peers.get(sender.me.peer)
            up = known is not None and known.hello.incarnation == sender.me.incarnation
            match say.message:
                case Hello() as message:
                    self.apply(table, table.hello(message, self.now))
                case Introduce() as message if up:
                    self.apply(table, table.introduce(sender.me.peer, message, self.now))
                case Ready() as message if up:
                    self.apply(table, table.peer_ready(sender.me.peer, message))
                case Goodbye() as message if up:
                    self.apply(table, table.goodbye(sender.me.peer, message, self.now))
            if up and sender.me.peer in table.peers:
                table.heard(sender.me.peer, self.now)

    def run(self, seconds: float, *, beats: bool = True) -> None:
        """Let time go by; with `beats`, everybody hears from everybody that considers it a peer."""
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            for table in list(self.tables.values()):
                self.apply(table, table.tick(self.now))
                self.deliver()
                for peer in table.peers.values() if beats else ():
                    other = self.tables.get(peer.hello.address)
                    mine = other.peers.get(table.me.peer) if other else None
                    if mine and mine.hello.incarnation == table.me.incarnation:
                        mine.heard = self.now

    def log(self, table: PeerTable) -> list[str]:
        """The events of a table since last asked, as words."""
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


@pytest.fixture
def world() -> World:
    return World()


def test_a_hello_is_answered_and_both_sides_are_up(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.apply(scheduler, scheduler.set_ready(Ready(url="s")))
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    assert world.log(scheduler) == ["frontend-0 up as frontend"]
    assert world.log(frontend) == ["scheduler-0 up as scheduler", "scheduler-0 ready"]
    assert [say.target for say in world.said[:2]] == ["", frontend.me.incarnation]
    said = len(world.said)
    world.run(1.0)
    assert len(world.said) == said, "an answered Hello is not repeated"


def test_becoming_ready_later_is_told_to_everybody_once(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontends = [world.start(FRONTEND, f"frontend-{i}", dial=(scheduler.me.address,)) for i in range(3)]
    world.deliver()
    world.apply(scheduler, scheduler.set_ready(Ready(url="a")))
    world.run(10.0)
    for frontend in frontends:
        assert world.log(frontend) == ["scheduler-0 up as scheduler", "scheduler-0 ready"]
    world.apply(scheduler, scheduler.set_ready(Ready(url="b")))
    world.run(0.1)
    assert world.log(frontends[0]) == ["scheduler-0 ready"], "what changed is told again"


def test_a_hello_to_nobody_is_repeated_until_somebody_is_there(world: World) -> None:
    scheduler = hello(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.address,))
    world.run(5.0)
    tries = [say for say in world.said if say.address == scheduler.address]
    assert 15 <= len(tries) <= 30, "first quickly, then every interval"
    world.tables[scheduler.address] = late = PeerTable(scheduler)
    world.events[scheduler.incarnation] = []
    world.run(0.5)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"]
    assert world.log(late) == ["frontend-0 up as frontend"]


def test_both_may_dial_at_once(world: World) -> None:
    one = world.start(SCHEDULER, address="tcp://127.0.0.1:1000", dial=("tcp://127.0.0.1:2000",))
    two = world.start(DETOKENIZER, address="tcp://127.0.0.1:2000", dial=("tcp://127.0.0.1:1000",))
    world.run(3.0)
    assert world.log(one) == ["detokenizer-0 up as detokenizer"]
    assert world.log(two) == ["scheduler-0 up as scheduler"]


def test_a_new_incarnation_takes_the_old_one_down_first(world: World) -> None:
    frontend = world.start(FRONTEND)
    old = world.start(SCHEDULER, dial=(frontend.me.address,))
    world.deliver()
    world.log(frontend)
    world.kill(old)
    new = world.start(SCHEDULER, dial=(frontend.me.address,))
    world.deliver()
    assert world.log(frontend) == [
        "scheduler-0 down: replaced by a new incarnation",
        "scheduler-0 up as scheduler",
    ]
    assert frontend.peers["scheduler-0"].hello.incarnation == new.me.incarnation
    assert old.me.address in world.closed


def test_a_late_hello_of_a_dead_incarnation_harms_nobody(world: World) -> None:
    frontend = world.start(FRONTEND)
    old = world.start(SCHEDULER)
    world.kill(old)
    new = world.start(SCHEDULER, dial=(frontend.me.address,))
    world.deliver()
    world.apply(frontend, frontend.hello(old.me, world.now))
    world.run(5.0)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"]
    assert frontend.peers["scheduler-0"].hello.incarnation == new.me.incarnation
    assert old.me.address not in frontend.links, "it is not called for ever"


def test_a_restart_at_the_same_port_is_a_new_peer(world: World) -> None:
    address = "tcp://127.0.0.1:5000"
    frontend = world.start(FRONTEND, dial=(address,))
    old = world.start(SCHEDULER, address=address)
    world.run(0.5)
    world.log(frontend)
    world.kill(old)
    world.start(SCHEDULER, address=address, dial=(frontend.me.address,))
    world.run(0.5)
    assert world.log(frontend) == [
        "scheduler-0 down: another process took its address",
        "scheduler-0 up as scheduler",
    ]


def test_silence_takes_a_peer_down_and_its_address_is_dialled_while_wanted(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    world.log(frontend)
    world.kill(scheduler)
    world.run(1.9)
    assert world.log(frontend) == []
    world.run(0.2)
    assert world.log(frontend) == ["scheduler-0 down: silent for 2.0 s"]
    assert world.closed == [scheduler.me.address]
    world.tables[scheduler.me.address] = scheduler
    world.run(0.5)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"], "it was only hung"
    world.kill(scheduler)
    world.apply(frontend, frontend.want(set(), world.now))
    world.run(3.0)
    assert world.log(frontend) == ["scheduler-0 down: silent for 2.0 s"]
    assert not frontend.links, "its address is gone, so nobody is dialled"


def test_a_broken_connection_is_noticed_before_silence(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    world.log(frontend)
    world.apply(frontend, frontend.connection(scheduler.me.address, False, world.now))
    world.apply(frontend, frontend.connection(scheduler.me.address, True, world.now + 0.02))
    world.run(1.0)
    assert world.log(frontend) == [], "it came back at once"
    world.apply(frontend, frontend.connection(scheduler.me.address, False, world.now))
    world.kill(scheduler)
    world.run(0.2)
    assert world.log(frontend) == ["scheduler-0 down: its connection broke"]


def test_who_did_not_listen_calls_nobody_silent(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.run(0.5)
    world.log(frontend)
    world.now += 60.0
    world.run(1.0)
    assert world.log(frontend) == []
    assert world.log(scheduler) == ["frontend-0 up as frontend"]


def test_who_lost_us_and_says_hello_again_is_told_all_again(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.apply(scheduler, scheduler.set_ready(Ready(url="s")))
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    world.log(frontend)
    world.apply(frontend, frontend.connection(scheduler.me.address, False, world.now))
    world.run(0.7)
    assert world.log(frontend) == [
        "scheduler-0 down: its connection broke",
        "scheduler-0 up as scheduler",
        "scheduler-0 ready",
    ]
    assert world.log(scheduler) == ["frontend-0 up as frontend"], "to the other side nothing happened"


def test_who_says_hello_is_not_silent(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    for _ in range(5):
        world.run(1.0, beats=False)
        world.apply(scheduler, scheduler.hello(frontend.me, world.now))
    assert world.log(scheduler) == ["frontend-0 up as frontend"]


def test_goodbye_takes_a_peer_down_with_its_reason(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    world.log(frontend)
    world.apply(scheduler, scheduler.leave("maintenance"))
    world.deliver()
    assert world.log(frontend) == ["scheduler-0 down: goodbye: maintenance"]


def test_a_frontend_introduces_every_detokenizer_to_every_scheduler(world: World) -> None:
    schedulers = [world.start(SCHEDULER, f"scheduler-{i}") for i in range(2)]
    detokenizers = [world.start(DETOKENIZER, f"detokenizer-{i}") for i in range(2)]
    dial = tuple(table.me.address for table in (*schedulers, *detokenizers))
    frontend = world.start(FRONTEND, dial=dial)
    world.start(FRONTEND, "frontend-1", dial=dial)
    world.run(1.0)
    for table in schedulers:
        assert set(table.peers) == {"frontend-0", "frontend-1", "detokenizer-0", "detokenizer-1"}
    for table in detokenizers:
        assert set(table.peers) == {"frontend-0", "frontend-1", "scheduler-0", "scheduler-1"}
    assert set(frontend.peers) == {"scheduler-0", "scheduler-1", "detokenizer-0", "detokenizer-1"}
    for table in schedulers:
        assert len(world.log(table)) == 4, "each peer came up once"


def test_introductions_are_repeated_so_that_none_is_needed(world: World) -> None:
    scheduler, detokenizer = world.start(SCHEDULER), world.start(DETOKENIZER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address, detokenizer.me.address))
    world.lose = lambda say: isinstance(say.message, Introduce)
    world.run(1.0)
    assert set(frontend.peers) == {"scheduler-0", "detokenizer-0"}
    world.lose = lambda _: False
    assert "detokenizer-0" not in scheduler.peers
    world.run(2.5)
    assert "detokenizer-0" in scheduler.peers


def test_a_supervisor_knows_everybody_and_introduces_nobody(world: World) -> None:
    supervisor = world.start(Role.SUPERVISOR)
    for role in (SCHEDULER, DETOKENIZER):
        world.start(role, dial=(supervisor.me.address,))
    world.run(3.0)
    assert set(supervisor.peers) == {"scheduler-0", "detokenizer-0"}
    assert not [say for say in world.said if isinstance(say.message, Introduce)]


def test_the_introduced_are_not_dialled_for_ever(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    introduced = Introduce(peer="detokenizer-0", role=DETOKENIZER, address="ipc:///run/gone.ipc")
    world.apply(scheduler, scheduler.introduce("frontend-0", introduced, world.now))
    world.run(INTRODUCED_TIME - 1)
    assert "ipc:///run/gone.ipc" in scheduler.links
    world.run(2)
    assert "ipc:///run/gone.ipc" not in scheduler.links
    assert "ipc:///run/gone.ipc" in world.closed


@pytest.mark.parametrize(
    ("teller", "role", "address"),
    [
        (DETOKENIZER, DETOKENIZER, "ipc:///run/x.ipc"),
        (FRONTEND, SCHEDULER, "ipc:///run/x.ipc"),
        (FRONTEND, FRONTEND, "ipc:///run/x.ipc"),
        (FRONTEND, DETOKENIZER, "tcp://10.0.0.1:22"),
        (FRONTEND, DETOKENIZER, "ipc:///run/*"),
        (FRONTEND, DETOKENIZER, "nonsense"),
    ],
)
def test_not_every_introduction_is_followed(world: World, teller: Role, role: Role, address: str) -> None:
    scheduler = world.start(SCHEDULER)
    told_by = world.start(teller, dial=(scheduler.me.address,))
    world.deliver()
    message = Introduce(peer="someone", role=role, address=address)
    world.apply(scheduler, scheduler.introduce(told_by.me.peer, message, world.now))
    world.apply(scheduler, scheduler.introduce("a stranger", message, world.now))
    assert set(scheduler.links) == {told_by.me.address}


def test_another_major_version_is_refused_by_name_on_both_sides(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    stranger = hello(FRONTEND, version=(2, 1))
    for _ in range(3):
        world.apply(scheduler, scheduler.hello(stranger, world.now))
    assert world.log(scheduler) == ["frontend-0 refused: frontend-0 speaks wire version 2.1, this part speaks 1.0"]
    world.mute.add(stranger.address)
    world.said.clear()
    world.run(0.5)
    answers = [say.message for say in world.said if say.address == stranger.address]
    assert isinstance(answers[0], Hello)
    assert answers[0].version == (1, 0), "it can see for itself"
    assert isinstance(answers[1], Goodbye)
    assert "2.1" in answers[1].reason
    assert "1.0" in answers[1].reason
    assert len(answers) == 2
    assert not scheduler.links
    assert not scheduler.peers


def test_an_incompatible_peer_that_is_wanted_is_dialled_again_at_leisure(world: World) -> None:
    stranger = hello(SCHEDULER, version=(2, 0))
    frontend = world.start(FRONTEND, dial=(stranger.address,))
    answer = msgspec.structs.replace(stranger, reply=True)
    world.apply(frontend, frontend.hello(answer, world.now))
    assert world.log(frontend) == ["scheduler-0 refused: scheduler-0 speaks wire version 2.0, this part speaks 1.0"]
    world.said.clear()
    world.run(REFUSED_PAUSE - 1)
    assert not world.said, "an answer gets no answer, or the two would never stop"
    world.run(2.0)
    assert world.said


def test_a_newer_minor_is_welcome(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    newer = hello(FRONTEND, version=(1, 7))
    world.tables[newer.address] = PeerTable(newer)
    world.events[newer.incarnation] = []
    world.apply(scheduler, scheduler.hello(newer, world.now))
    assert world.log(scheduler) == ["frontend-0 up as frontend"]


@pytest.mark.parametrize(
    "settings", [{"peer": "../etc"}, {"address": "tcp://10.0.0.1:1"}, {"address": "ipc:///" + "x" * 200}]
)
def test_an_impossible_hello_is_not_answered(world: World, settings: dict[str, str]) -> None:
    scheduler = world.start(SCHEDULER)
    bad = msgspec.structs.replace(hello(FRONTEND), **settings)
    for _ in range(3):
        world.apply(scheduler, scheduler.hello(bad, world.now))
    assert len(world.log(scheduler)) == 1
    assert not scheduler.links
    assert not world.said


def test_peers_are_bounded_in_number(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    scheduler.max_peers = 2
    tables = [world.start(FRONTEND, f"frontend-{i}", dial=(scheduler.me.address,)) for i in range(2)]
    world.run(0.5)
    third = world.start(FRONTEND, "frontend-2", dial=(scheduler.me.address,))
    world.run(0.5)
    assert set(scheduler.peers) == {"frontend-0", "frontend-1"}
    assert "frontend-2 refused: scheduler-0 has 2 peers already" in world.log(scheduler)
    world.kill(tables[0])
    world.run(3.0)
    world.kill(third)
    world.start(FRONTEND, "frontend-2", dial=(scheduler.me.address,))
    world.run(0.5)
    assert set(scheduler.peers) == {"frontend-1", "frontend-2"}


def test_a_flood_of_hellos_from_nowhere_is_bounded(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    scheduler.max_peers = 10
    for number in range(100):
        world.apply(scheduler, scheduler.hello(hello(FRONTEND, f"f-{number}"), world.now))
    assert len(scheduler.links) <= 20
    world.run(3.0)
    assert not scheduler.links


def test_addresses_are_dialled_in_an_order_that_does_not_change(world: World) -> None:
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(1000, 1040)]
    frontend = world.start(FRONTEND, dial=tuple(addresses))
    assert list(frontend.links) == addresses
    world.apply(frontend, frontend.want(set(), world.now))
    assert world.closed == addresses


def test_my_own_hello_is_not_a_peer(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.apply(scheduler, scheduler.want({scheduler.me.address}, world.now))
    world.apply(scheduler, scheduler.hello(scheduler.me, world.now))
    world.run(1.0)
    assert not scheduler.links
    assert not scheduler.peers
    assert not world.said


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.floats(0.0, 0.6))
def test_whatever_is_lost_and_whoever_dies_everybody_meets_in_the_end(random: object, losses: float) -> None:
    roll: Callable[[], float] = random.random  # type: ignore[attr-defined]
    world = World()
    world.lose = lambda _: roll() < losses
    frontend = world.start(FRONTEND)
    parts = {role: world.start(role) for role in (SCHEDULER, DETOKENIZER)}
    for _ in range(6):
        world.apply(frontend, frontend.want({part.me.address for part in parts.values()}, world.now))
        world.run(3 * roll(), beats=roll() > losses)
        role = SCHEDULER if roll() < 0.5 else DETOKENIZER
        if roll() < 0.5:
            world.kill(parts[role])
            parts[role] = world.start(role)
    world.lose = lambda _: False
    world.apply(frontend, frontend.want({part.me.address for part in parts.values()}, world.now))
    world.run(25.0)
    everybody = {frontend.me.peer: frontend, "scheduler-0": parts[SCHEDULER], "detokenizer-0": parts[DETOKENIZER]}
    for name, table in everybody.items():
        assert {peer: known.hello.incarnation for peer, known in table.peers.items()} == {
            other: everybody[other].me.incarnation for other in everybody if other != name
        }
        ups, downs = (
            [event.peer for event in world.events[table.me.incarnation] if isinstance(event, kind)]
            for kind in (PeerUp, PeerDown)
        )
        for other in table.peers:
            assert ups.count(other) == downs.count(other) + 1, "every up but the last was taken down"
