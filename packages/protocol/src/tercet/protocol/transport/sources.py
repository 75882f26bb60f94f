"""Who speaks: looked up by the key shown and the bytes of the envelope, so that it costs nothing per message."""

from tercet.protocol.messages.values import Role

PER_PEER = 4
"""Envelopes remembered of one peer. An honest one uses a single encoding; MessagePack has others without end."""
LARGEST = 1024
"""Bytes of an envelope worth remembering."""


class EnvelopeCache:
    """Peers by what they show. What is not remembered must be read each time, which costs time but no memory."""

    def __init__(self) -> None:
        self._peers: dict[tuple[Role | None, bytes], str] = {}
        self._shown: dict[str, list[tuple[Role | None, bytes]]] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def find(self, key: Role | None, envelope: bytes) -> str | None:
        """The peer that shows this, if it is remembered."""
        return self._peers.get((key, envelope))

    def remember(self, key: Role | None, envelope: bytes, peer: str) -> None:
        """That a peer shows this; nothing beyond the bounds."""
        shown = self._shown.setdefault(peer, [])
        if len(shown) < PER_PEER and len(envelope) <= LARGEST:
            shown.append((key, envelope))
            self._peers[key, envelope] = peer

    def forget(self, peer: str) -> None:
        """All that a peer showed."""
        for each in self._shown.pop(peer, ()):
            del self._peers[each]
