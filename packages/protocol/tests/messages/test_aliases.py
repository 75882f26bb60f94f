"""Processes with several addresses, and late messages of an earlier incarnation."""

import msgspec
import pytest

from packages.protocol.tests.world import World, hello
from tercet.protocol.membership.links import Close, LinkState, Send
from tercet.protocol.membership.peers import FAILED_PAUSE, PeerTable
from tercet.protocol.messages.messages import Goodbye, Hello, Introduce
from tercet.protocol.messages.values import Role

FRONTEND, SCHEDULER, DETOKENIZER = Role.FRONTEND, Role.SCHEDULER, Role.DETOKENIZER
VIRTUAL = "tcp://127.0.0.1:9000"
"""Address that leads to a scheduler which advertises another one."""


@pytest.fixture
def world() -> World:
    return World()


def hellos(world: World, address: str) -> int:
    return sum(send.address == address and isinstance(send.message, Hello) for send in world.sent)


def behind_virtual_address(world: World) -> PeerTable:
    scheduler = world.start(SCHEDULER, address="tcp://127.0.0.1:5000")
    world.tables[VIRTUAL] = scheduler
    return scheduler


def test_an_alias_of_a_linked_peer_is_not_dialed_again(world: World) -> None:
    scheduler = behind_virtual_address(world)
    frontend = world.start(FRONTEND, dial=(VIRTUAL,))
    world.run(1.0)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"]
    assert frontend.peers["scheduler-0"].hello.address == scheduler.me.address
    assert frontend.links[VIRTUAL].state is LinkState.ALIAS
    assert VIRTUAL in world.closed, "the connection that is not needed is closed"
    said = len(world.sent)
    world.run(10.0)
    assert len(world.sent) == said, "both are silent but for heartbeats"
    assert world.log(scheduler) == ["frontend-0 up as frontend"]


def test_when_such_a_peer_dies_its_alias_is_dialled_again(world: World) -> None:
    scheduler = behind_virtual_address(world)
    frontend = world.start(FRONTEND, dial=(VIRTUAL,))
    world.run(1.0)
    world.log(frontend)
    world.kill(scheduler)
    del world.tables[VIRTUAL]
    world.run(3.0)
    assert world.log(frontend) == ["scheduler-0 down: silent for 2.0 s"]
    world.tables[VIRTUAL] = world.start(SCHEDULER, address="tcp://127.0.0.1:5001")
    world.run(1.0)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"]
    assert frontend.peers["scheduler-0"].hello.address == "tcp://127.0.0.1:5001"


def test_an_alias_that_is_wanted_no_more_is_forgotten(world: World) -> None:
    behind_virtual_address(world)
    frontend = world.start(FRONTEND, dial=(VIRTUAL,))
    world.run(1.0)
    world.apply(frontend, frontend.dial(set(), world.now))
    assert list(frontend.links) == ["tcp://127.0.0.1:5000"]


def test_an_introduction_to_an_alias_does_not_start_over_each_time(world: World) -> None:
    detokenizer = world.start(DETOKENIZER, address="tcp://127.0.0.1:6000")
    world.start(FRONTEND, dial=(detokenizer.me.address,))
    behind_virtual_address(world)
    world.deliver()
    introduction = Introduce(peer="scheduler-0", role=SCHEDULER, address=VIRTUAL)
    for _ in range(10):
        world.apply(detokenizer, detokenizer.handle_introduce("frontend-0", introduction, world.now))
        world.run(1.0)
    assert "scheduler-0" in detokenizer.peers
    assert hellos(world, VIRTUAL) <= 3


def test_a_peer_that_cannot_be_reached_where_it_says_is_told_of_once(world: World) -> None:
    scheduler = behind_virtual_address(world)
    del world.tables[scheduler.me.address]
    frontend = world.start(FRONTEND, dial=(VIRTUAL,))
    world.run(10.0)
    where = "tcp://127.0.0.1:5000, its address"
    assert world.log(frontend) == [f"scheduler-0 refused: nobody answers at {where}"]
    assert not frontend.peers


def test_an_answer_cannot_silence_a_call_that_was_not_made(world: World) -> None:
    scheduler = world.start(SCHEDULER, address="tcp://127.0.0.1:5000")
    frontend = world.start(FRONTEND, dial=(scheduler.me.address, "tcp://127.0.0.1:7000"))
    world.run(1.0)
    answer = msgspec.structs.replace(scheduler.me, reply=True, dialled="tcp://127.0.0.1:7000")
    assert frontend.handle_hello(answer, world.now) == [], "nobody was ever reached there"
    other = world.start(SCHEDULER, "scheduler-1", address="tcp://127.0.0.1:7000")
    world.run(1.0)
    assert frontend.peers["scheduler-1"].hello.incarnation == other.me.incarnation


def test_a_replayed_hello_of_an_earlier_start_takes_nobody_down(world: World) -> None:
    address = "tcp://127.0.0.1:5000"
    frontend = world.start(FRONTEND, dial=(address,))
    old = world.start(SCHEDULER, address=address)
    world.run(0.5)
    world.kill(old)
    new = world.start(SCHEDULER, address=address, dial=(frontend.me.address,))
    world.run(0.5)
    world.log(frontend)
    for reply in (False, True):
        for _ in range(3):
            world.apply(frontend, frontend.handle_hello(msgspec.structs.replace(old.me, reply=reply), world.now))
            world.run(1.0)
    assert world.log(frontend) == ["scheduler-0 refused: a later start of it has taken its place"]
    assert frontend.peers["scheduler-0"].hello.incarnation == new.me.incarnation


def test_who_said_goodbye_does_not_come_back_by_a_late_hello(world: World) -> None:
    frontend = world.start(FRONTEND)
    scheduler = world.start(SCHEDULER, dial=(frontend.me.address,))
    world.deliver()
    world.apply(frontend, frontend.handle_goodbye("scheduler-0", Goodbye(reason="done"), world.now))
    world.log(frontend)
    world.apply(frontend, frontend.handle_hello(scheduler.me, world.now))
    assert not frontend.peers
    assert not frontend.links


def test_a_silent_peer_may_come_back_as_it_was(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    world.kill(scheduler)
    world.run(3.0)
    world.tables[scheduler.me.address] = scheduler
    world.log(frontend)
    world.run(1.0)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"]


def test_what_is_remembered_of_the_dead_is_bounded(world: World) -> None:
    frontend = world.start(FRONTEND)
    frontend.max_peers = 5
    for _ in range(200):
        scheduler = world.start(SCHEDULER, dial=(frontend.me.address,))
        world.deliver()
        world.kill(scheduler)
    for number in range(200):
        scheduler = world.start(SCHEDULER, f"scheduler-{number}", dial=(frontend.me.address,))
        world.deliver()
        world.apply(frontend, frontend.handle_goodbye(scheduler.me.peer, Goodbye(), world.now))
        world.kill(scheduler)
    assert len(frontend._ended) <= 20
    assert len(frontend._last_incarnations) <= 20


def test_a_refused_key_is_retried_slowly_with_a_new_socket(world: World) -> None:
    address = "tcp://127.0.0.1:5000"
    frontend = world.start(FRONTEND, dial=(address,))
    before = hellos(world, address)
    world.apply(frontend, frontend.on_connection_failed(address, world.now))
    assert world.closed == [address]
    world.run(FAILED_PAUSE - 0.1)
    assert hellos(world, address) == before
    world.run(0.3)
    assert hellos(world, address) > before


def test_every_first_hello_says_where_it_was_sent(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    assert [send.message.dialled for send in world.sent if isinstance(send.message, Hello)] == [
        scheduler.me.address
    ] * 2
    stranger = hello(FRONTEND, "frontend-1")
    [answer] = scheduler.handle_hello(stranger, world.now)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Hello)
    assert answer.message.dialled == "", "an older part does not say, and nothing is made up"
    assert Close(stranger.address) not in scheduler.tick(world.now)
