"""Cache of authenticated senders, by key and envelope bytes, so that authentication costs nothing per message."""

from tercet.protocol.messages.values import Role

PER_PEER = 4
"""Envelopes cached per peer. A correct peer uses a single encoding; MessagePack allows an unlimited number."""
LARGEST = 1024
"""Bytes of the largest envelope to cache."""


class EnvelopeCache:
    """Cache of peers by key and envelope; others are decoded each time, which bounds the memory."""

    def __init__(self) -> None:
        self._peers: dict[tuple[Role | None, bytes], str] = {}
        self._shown: dict[str, list[tuple[Role | None, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, key: Role | None, envelope: bytes) -> str | None:
        """Return the cached peer, or None."""
        return self._peers.get((key, envelope))

    def remember(self, key: Role | None, envelope: bytes, peer: str) -> None:
        """Cache the peer of an envelope, within the bounds."""
        shown = self._shown.setdefault(peer, [])
        if len(shown) < PER_PEER and len(envelope) <= LARGEST:
            shown.append((key, envelope))
            self._peers[key, envelope] = peer

    def forget(self, peer: str) -> None:
        """Drop the envelopes of a peer."""
        for each in self._shown.pop(peer, ()):
            del self._peers[each]
