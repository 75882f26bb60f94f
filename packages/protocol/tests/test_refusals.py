"""Peers that the table refuses, and bounds on the state they cause."""

import msgspec
import pytest

from packages.protocol.tests.world import World, hello
from tercet.protocol.membership.peers import REFUSED_PAUSE, PeerTable
from tercet.protocol.messages.messages import Goodbye, Hello, Introduce
from tercet.protocol.messages.values import Role

FRONTEND, SCHEDULER, DETOKENIZER = Role.FRONTEND, Role.SCHEDULER, Role.DETOKENIZER


@pytest.fixture
def world() -> World:
    return World()


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
    world.apply(scheduler, scheduler.handle_introduce(told_by.me.peer, message, world.now))
    world.apply(scheduler, scheduler.handle_introduce("a stranger", message, world.now))
    assert set(scheduler.links) == {told_by.me.address}


def test_another_major_version_is_refused_by_name_on_both_sides(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    stranger = hello(FRONTEND, version=(2, 1))
    for _ in range(3):
        world.apply(scheduler, scheduler.handle_hello(stranger, world.now))
    assert world.log(scheduler) == ["frontend-0 refused: frontend-0 speaks wire version 2.1, this part speaks 1.1"]
    world.mute.add(stranger.address)
    world.sent.clear()
    world.run(0.5)
    answers = [send.message for send in world.sent if send.address == stranger.address]
    assert isinstance(answers[0], Hello)
    assert answers[0].version == (1, 0), "it can see for itself"
    assert isinstance(answers[1], Goodbye)
    assert "2.1" in answers[1].reason
    assert "1.1" in answers[1].reason
    assert len(answers) == 2
    assert not scheduler.links
    assert not scheduler.peers


def test_an_incompatible_peer_that_is_wanted_is_dialled_again_at_leisure(world: World) -> None:
    stranger = hello(SCHEDULER, version=(2, 0))
    frontend = world.start(FRONTEND, dial=(stranger.address,))
    answer = msgspec.structs.replace(stranger, reply=True)
    world.apply(frontend, frontend.handle_hello(answer, world.now))
    assert world.log(frontend) == ["scheduler-0 refused: scheduler-0 speaks wire version 2.0, this part speaks 1.1"]
    world.sent.clear()
    world.run(REFUSED_PAUSE - 1)
    assert not world.sent, "an answer gets no answer, or the two would never stop"
    world.run(2.0)
    assert world.sent


def test_a_newer_minor_is_welcome(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    newer = hello(FRONTEND, version=(1, 7))
    world.tables[newer.address] = PeerTable(newer)
    world.events[newer.incarnation] = []
    world.apply(scheduler, scheduler.handle_hello(newer, world.now))
    assert world.log(scheduler) == ["frontend-0 up as frontend"]


@pytest.mark.parametrize(
    "settings", [{"peer": "../etc"}, {"address": "tcp://10.0.0.1:1"}, {"address": "ipc:///" + "x" * 200}]
)
def test_an_impossible_hello_is_not_answered(world: World, settings: dict[str, str]) -> None:
    scheduler = world.start(SCHEDULER)
    bad = msgspec.structs.replace(hello(FRONTEND), **settings)
    for _ in range(3):
        world.apply(scheduler, scheduler.handle_hello(bad, world.now))
    assert len(world.log(scheduler)) == 1
    assert world.refused_again == 2, "counted, not told again"
    assert not scheduler.links
    assert not world.sent


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
        world.apply(scheduler, scheduler.handle_hello(hello(FRONTEND, f"f-{number}"), world.now))
    assert len(scheduler.links) <= 20
    world.run(3.0)
    assert not scheduler.links


@pytest.mark.parametrize("reply", [False, True])
@pytest.mark.parametrize(
    "claim",
    [
        hello(DETOKENIZER, "detokenizer-9", "tcp://127.0.0.1:2000"),
        hello(FRONTEND, "frontend-9", "tcp://127.0.0.1:2000"),
        hello(DETOKENIZER, "frontend-0", "tcp://127.0.0.1:9000"),
        hello(DETOKENIZER, "detokenizer-9", "tcp://127.0.0.1:2000", version=(2, 0)),
    ],
    ids=["another role's address", "another peer's address", "another role's name", "in another version"],
)
def test_a_hello_takes_nothing_from_a_peer_that_is_up(world: World, claim: Hello, reply: bool) -> None:
    scheduler = world.start(SCHEDULER, address="tcp://127.0.0.1:1000")
    frontend = world.start(FRONTEND, address="tcp://127.0.0.1:2000", dial=(scheduler.me.address,))
    world.run(0.5)
    world.log(scheduler)
    world.closed.clear()
    for _ in range(4):
        world.apply(scheduler, scheduler.handle_hello(msgspec.structs.replace(claim, reply=reply), world.now))
        world.run(0.5)
    [line] = world.log(scheduler)
    assert line.startswith(f"{claim.peer} refused: ")
    assert "still up" in line
    assert not world.closed
    assert scheduler.peers["frontend-0"].hello.incarnation == frontend.me.incarnation


def test_the_second_part_at_an_address_links_once_the_first_is_gone(world: World) -> None:
    """A deployment that advertises one address for both must not make them take turns."""
    address = "tcp://127.0.0.1:2000"
    frontend = world.start(FRONTEND)
    first = world.start(SCHEDULER, "scheduler-0", address=address, dial=(frontend.me.address,))
    world.run(0.5)
    second = PeerTable(hello(SCHEDULER, "scheduler-1", address))
    for _ in range(10):
        world.apply(frontend, frontend.handle_hello(second.me, world.now))
        world.run(0.25)
    still_up = f"scheduler-1 refused: scheduler-0 is still up at {address}"
    assert world.log(frontend) == ["scheduler-0 up as scheduler", still_up]
    world.kill(first)
    world.tables[address] = second
    world.events[second.me.incarnation] = []
    world.apply(second, second.dial({frontend.me.address}, world.now))
    world.run(3.0)
    assert world.log(frontend) == ["scheduler-0 down: silent for 2.0 s", "scheduler-1 up as scheduler"]


def test_a_peer_id_borrowed_by_another_role_returns_to_its_owner(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.run(0.5)
    world.kill(frontend)
    world.run(3.0)
    borrower = world.start(DETOKENIZER, "frontend-0", dial=(scheduler.me.address,))
    world.run(0.5)
    assert scheduler.peers["frontend-0"].hello.role is DETOKENIZER
    world.kill(borrower)
    world.run(3.0)
    world.tables[frontend.me.address] = frontend
    world.run(3.0)
    assert scheduler.peers["frontend-0"].hello.incarnation == frontend.me.incarnation
