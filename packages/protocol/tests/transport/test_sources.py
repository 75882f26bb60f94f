"""Who speaks is looked up, and what is remembered of one peer is little, whatever it shows."""

from tercet.protocol.messages.values import Role
from tercet.protocol.transport.sources import LARGEST, PER_PEER, EnvelopeCache


def test_it_is_found_by_key_and_envelope_until_forgotten() -> None:
    sources = EnvelopeCache()
    sources.remember(Role.FRONTEND, b"e", "frontend-0")
    sources.remember(None, b"e", "scheduler-0")
    assert sources.find(Role.FRONTEND, b"e") == "frontend-0"
    assert sources.find(None, b"e") == "scheduler-0"
    assert sources.find(Role.SCHEDULER, b"e") is None
    sources.forget("frontend-0")
    sources.forget("nobody")
    assert sources.find(Role.FRONTEND, b"e") is None
    assert sources.find(None, b"e") == "scheduler-0"


def test_one_peer_takes_no_room_from_others() -> None:
    sources = EnvelopeCache()
    sources.remember(None, bytes(LARGEST + 1), "frontend-0")
    assert len(sources) == 0
    for number in range(100):
        sources.remember(None, str(number).encode(), "frontend-0")
    assert len(sources) == PER_PEER
    sources.remember(None, b"e", "frontend-1")
    assert sources.find(None, b"e") == "frontend-1"
    sources.forget("frontend-0")
    sources.remember(None, b"f", "frontend-0")
    assert sources.find(None, b"f") == "frontend-0"
