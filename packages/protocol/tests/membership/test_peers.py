"""Peer table in worlds without sockets or clocks: messages in, events out."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packages.protocol.tests.world import World, hello
from tercet.protocol.membership.events import PeerDown, PeerUp
from tercet.protocol.membership.peers import INTRODUCED_TIME, UNSENT_TIME, PeerTable
from tercet.protocol.messages.messages import Introduce, Ready
from tercet.protocol.messages.values import Role

FRONTEND, SCHEDULER, DETOKENIZER = Role.FRONTEND, Role.SCHEDULER, Role.DETOKENIZER


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
    assert [send.target for send in world.sent[:2]] == ["", frontend.me.incarnation]
    said = len(world.sent)
    world.run(1.0)
    assert len(world.sent) == said, "an answered Hello is not repeated"


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
    tries = [send for send in world.sent if send.address == scheduler.address]
    assert 15 <= len(tries) <= 30, "first quickly, then every interval"
    world.tables[scheduler.address] = late = PeerTable(scheduler)
    world.events[scheduler.incarnation] = []
    world.run(0.5)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"]
    assert world.log(late) == ["frontend-0 up as frontend"]


def test_a_socket_by_which_no_hello_gets_away_is_made_anew(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.kill(scheduler)
    address = scheduler.me.address
    frontend = world.start(FRONTEND, dial=(address,))
    world.run(UNSENT_TIME - 0.5)
    assert world.closed == []
    world.run(1.0)
    assert world.closed == [address]
    world.run(UNSENT_TIME + 0.5)
    assert world.closed == [address, address]
    world.tables[address] = scheduler
    world.run(UNSENT_TIME + 0.5)
    assert world.log(frontend) == ["scheduler-0 up as scheduler"]
    assert world.closed == [address, address], "what is up keeps its socket"


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
    world.apply(frontend, frontend.handle_hello(old.me, world.now))
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
    world.apply(frontend, frontend.dial(set(), world.now))
    world.run(3.0)
    assert world.log(frontend) == ["scheduler-0 down: silent for 2.0 s"]
    assert not frontend.links, "its address is gone, so nobody is dialled"


def test_a_broken_connection_is_noticed_before_silence(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    world.log(frontend)
    world.apply(frontend, frontend.on_connection(scheduler.me.address, False, world.now))
    world.apply(frontend, frontend.on_connection(scheduler.me.address, True, world.now + 0.02))
    world.run(1.0)
    assert world.log(frontend) == [], "it came back at once"
    world.apply(frontend, frontend.on_connection(scheduler.me.address, False, world.now))
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
    world.apply(frontend, frontend.on_connection(scheduler.me.address, False, world.now))
    world.run(0.7)
    assert world.log(frontend) == [
        "scheduler-0 down: its connection broke",
        "scheduler-0 up as scheduler",
        "scheduler-0 ready",
    ]
    assert world.log(scheduler) == ["frontend-0 up as frontend"], "to the other side nothing happened"


def test_who_slept_is_a_peer_again_at_once_though_others_gave_it_up(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.run(0.5)
    world.log(frontend)
    world.log(scheduler)
    asleep = world.tables.pop(frontend.me.address)
    world.run(5.0)
    assert world.log(scheduler) == ["frontend-0 down: silent for 2.0 s"]
    world.tables[frontend.me.address] = asleep
    world.run(0.2)
    assert world.log(scheduler) == ["frontend-0 up as frontend"]
    world.run(5.0)
    assert world.log(frontend) == world.log(scheduler) == []


def test_who_says_hello_is_not_silent(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    frontend = world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    for _ in range(5):
        world.run(1.0, beats=False)
        world.apply(scheduler, scheduler.handle_hello(frontend.me, world.now))
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
    world.lose = lambda send: isinstance(send.message, Introduce)
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
    assert not [send for send in world.sent if isinstance(send.message, Introduce)]


def test_the_introduced_are_not_dialled_for_ever(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.start(FRONTEND, dial=(scheduler.me.address,))
    world.deliver()
    introduced = Introduce(peer="detokenizer-0", role=DETOKENIZER, address="ipc:///run/gone.ipc")
    world.apply(scheduler, scheduler.handle_introduce("frontend-0", introduced, world.now))
    world.run(INTRODUCED_TIME - 1)
    assert "ipc:///run/gone.ipc" in scheduler.links
    world.run(2)
    assert "ipc:///run/gone.ipc" not in scheduler.links
    assert "ipc:///run/gone.ipc" in world.closed


def test_addresses_are_dialled_in_an_order_that_does_not_change(world: World) -> None:
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(1000, 1040)]
    frontend = world.start(FRONTEND, dial=tuple(addresses))
    assert list(frontend.links) == addresses
    world.apply(frontend, frontend.dial(set(), world.now))
    assert world.closed == addresses


def test_my_own_hello_is_not_a_peer(world: World) -> None:
    scheduler = world.start(SCHEDULER)
    world.apply(scheduler, scheduler.dial({scheduler.me.address}, world.now))
    world.apply(scheduler, scheduler.handle_hello(scheduler.me, world.now))
    world.run(1.0)
    assert not scheduler.links
    assert not scheduler.peers
    assert not world.sent


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False), st.floats(0.0, 0.6))
def test_whatever_is_lost_and_whoever_dies_everybody_meets_in_the_end(random: object, losses: float) -> None:
    roll: Callable[[], float] = random.random  # type: ignore[attr-defined]
    world = World()
    world.lose = lambda _: roll() < losses
    frontend = world.start(FRONTEND)
    parts = {role: world.start(role) for role in (SCHEDULER, DETOKENIZER)}
    for _ in range(6):
        world.apply(frontend, frontend.dial({part.me.address for part in parts.values()}, world.now))
        world.run(3 * roll(), beats=roll() > losses)
        role = SCHEDULER if roll() < 0.5 else DETOKENIZER
        if roll() < 0.5:
            world.kill(parts[role])
            parts[role] = world.start(role)
    world.lose = lambda _: False
    world.apply(frontend, frontend.dial({part.me.address for part in parts.values()}, world.now))
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
