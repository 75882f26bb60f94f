from tercet.protocol.messages import Message, Rejected
from tercet.scheduler.core.config import Arrival, PeerBlocked, PeerDrained
from tercet.scheduler.outbox import Outbox


class Wire:
    """A node whose queues can be full."""

    def __init__(self) -> None:
        self.full: set[str] = set()
        self.sent: list[tuple[str, str]] = []

    def send(self, peer: str, message: Message) -> bool:
        if peer in self.full:
            return False
        assert isinstance(message, Rejected)
        self.sent.append((peer, message.rid))
        return True


def say(*pairs: tuple[str, str]) -> list[tuple[str, Message]]:
    return [(peer, Rejected(rid=rid, attempt=0, code="c", message="m")) for peer, rid in pairs]


def test_a_full_peer_gets_its_messages_later_and_in_order() -> None:
    wire = Wire()
    outbox = Outbox(wire.send)
    wire.full = {"a"}
    outbox.send(say(("a", "1"), ("b", "2")))
    assert outbox.flush() == [Arrival("a", PeerBlocked("a"))]
    wire.full = set()
    outbox.send(say(("a", "3")))
    assert wire.sent == [("b", "2")]
    assert outbox.flush() == [Arrival("a", PeerDrained("a"))]
    assert wire.sent == [("b", "2"), ("a", "1"), ("a", "3")]
    assert outbox.backlog == 0


def test_a_peer_that_is_gone_leaves_nothing_behind() -> None:
    wire = Wire()
    outbox = Outbox(wire.send)
    wire.full = {"a"}
    outbox.send(say(("a", "1")))
    outbox.forget("a")
    outbox.forget("b")
    assert outbox.backlog == 0
    assert outbox.flush() == [Arrival("a", PeerBlocked("a")), Arrival("a", PeerDrained("a"))]
    assert wire.sent == []
