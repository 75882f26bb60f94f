"""Cache of envelopes: senders are looked up, and the state of one peer is bounded."""

from tercet.protocol.messages.values import Role
from tercet.protocol.transport.peer_auth import MAX_ENVELOPE_BYTES, MAX_PER_PEER, EnvelopeCache


def test_it_is_found_by_key_and_envelope_until_forgotten() -> None:
    cache = EnvelopeCache()
    cache.add(Role.FRONTEND, b"e", "frontend-0")
    cache.add(None, b"e", "scheduler-0")
    assert cache.find(Role.FRONTEND, b"e") == "frontend-0"
    assert cache.find(None, b"e") == "scheduler-0"
    assert cache.find(Role.SCHEDULER, b"e") is None
    cache.forget("frontend-0")
    cache.forget("nobody")
    assert cache.find(Role.FRONTEND, b"e") is None
    assert cache.find(None, b"e") == "scheduler-0"


def test_one_peer_takes_no_room_from_others() -> None:
    cache = EnvelopeCache()
    cache.add(None, bytes(MAX_ENVELOPE_BYTES + 1), "frontend-0")
    assert len(cache) == 0
    for number in range(100):
        cache.add(None, str(number).encode(), "frontend-0")
    assert len(cache) == MAX_PER_PEER
    cache.add(None, b"e", "frontend-1")
    assert cache.find(None, b"e") == "frontend-1"
    cache.forget("frontend-0")
    cache.add(None, b"f", "frontend-0")
    assert cache.find(None, b"f") == "frontend-0"
