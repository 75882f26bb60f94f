"""Messages for full peers wait in order, within bounds."""

from collections import Counter

from tercet.protocol.backlog import BacklogSender, Send
from tercet.protocol.messages.messages import Message, Rejected
from tercet.protocol.testing import ScriptedClock

PATIENCE = 30.0
MOST = 20


class Wire:
    """A node whose queues can be full."""

    def __init__(self) -> None:
        self.full: set[str] = set()
        self.sent: list[tuple[str, str]] = []
        self.frames: list[bytes] = []

    def send(self, peer: str, message: Message, *frames: bytes) -> bool:
        if peer in self.full:
            return False
        assert isinstance(message, Rejected)
        self.sent.append((peer, message.rid))
        self.frames += frames
        return True


def patient(send: Send, clock: ScriptedClock | None = None) -> BacklogSender:
    return BacklogSender(send, MOST, clock or ScriptedClock(), patience=PATIENCE)


def say(*pairs: tuple[str, str]) -> list[tuple[str, Message]]:
    return [(peer, Rejected(rid=rid, attempt=0, code="c", message="m")) for peer, rid in pairs]


def test_a_full_peer_gets_its_messages_later_and_in_order() -> None:
    wire = Wire()
    outbox = patient(wire.send)
    wire.full = {"a"}
    outbox.send(say(("a", "1"), ("b", "2")))
    assert outbox.flush() == [("a", True)]
    wire.full = set()
    outbox.send(say(("a", "3")))
    assert wire.sent == [("b", "2")]
    assert outbox.flush() == [("a", False)]
    assert wire.sent == [("b", "2"), ("a", "1"), ("a", "3")]
    assert outbox.backlog == 0


def test_raw_frames_stay_with_their_message() -> None:
    wire = Wire()
    outbox = patient(wire.send)
    wire.full = {"a"}
    [(peer, message)] = say(("a", "1"))
    outbox.send([(peer, message, b"vectors")])
    assert wire.frames == []
    wire.full = set()
    outbox.flush()
    assert wire.frames == [b"vectors"]


def test_a_peer_that_is_gone_leaves_nothing_behind() -> None:
    wire = Wire()
    outbox = patient(wire.send)
    wire.full = {"a"}
    outbox.send(say(("a", "1")))
    outbox.forget("a")
    outbox.forget("b")
    assert outbox.backlog == 0
    assert outbox.flush() == [("a", True), ("a", False)]
    assert wire.sent == []


def test_what_a_peer_never_takes_is_given_up_in_the_end() -> None:
    """A peer that never linked must not keep the loop polling, nor a leaving scheduler waiting."""
    wire, clock = Wire(), ScriptedClock()
    outbox = patient(wire.send, clock)
    wire.full = {"never"}
    outbox.send(say(("never", "1")))
    clock.advance(PATIENCE)
    assert outbox.flush() == [("never", True)]
    assert outbox.backlog == 1
    clock.advance(0.1)
    assert outbox.flush() == [("never", False)]
    assert outbox.backlog == 0


def test_a_peer_that_takes_anything_is_waited_for() -> None:
    clock = ScriptedClock()
    room = [0]

    def trickle(peer: str, message: Message, *frames: bytes) -> bool:
        room[0] -= 1
        return room[0] >= 0

    outbox = patient(trickle, clock)
    outbox.send(say(("slow", "1"), ("slow", "2"), ("slow", "3")))
    for left in (2, 1, 0):
        clock.advance(PATIENCE)
        room[0] = 1
        outbox.flush()
        assert outbox.backlog == left


def test_a_peer_that_never_listens_costs_bounded_memory() -> None:
    wire = Wire()
    outbox = patient(wire.send)
    wire.full = {"a"}
    outbox.send(say(("a", "r")) * (MOST + 10))
    assert outbox.backlog == MOST


def test_without_patience_a_full_backlog_loses_its_oldest_messages() -> None:
    wire, clock, counters = Wire(), ScriptedClock(), Counter[str]()
    outbox = BacklogSender(wire.send, 3, clock, counters=counters)
    wire.full = {"a"}
    outbox.send(say(*(("a", str(number)) for number in range(5))))
    clock.advance(1000 * PATIENCE)
    assert outbox.flush() == [("a", True)]
    assert (outbox.backlog, counters) == (3, {"dropped_backlog": 2})
    wire.full = set()
    assert outbox.flush() == [("a", False)]
    assert wire.sent == [("a", "2"), ("a", "3"), ("a", "4")]
