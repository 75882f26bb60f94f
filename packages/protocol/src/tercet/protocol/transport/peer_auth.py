"""Authorization of peers: the keys expected at addresses, the roles that keys may claim, and authenticated senders.

The cache of senders, by key and envelope bytes, makes authentication cost nothing per message.
"""

from collections.abc import Mapping

from tercet.protocol.messages.values import Role
from tercet.protocol.transport.security import Security

MAX_PER_PEER = 4
"""Envelopes cached per peer. A correct peer uses a single encoding; MessagePack allows an unlimited number."""
MAX_ENVELOPE_BYTES = 1024
"""Bytes of the largest envelope to cache."""


class PeerAuthorizer:
    """Authorizer of one node. Without `security` every claim is allowed."""

    def __init__(self, security: Security | None) -> None:
        self._security = security
        self.dialled: Mapping[str, Role | None] = {}
        """Roles by address, from the configuration."""
        self._announced: dict[str, Role] = {}
        """Roles by address, from peers."""

    def __len__(self) -> int:
        return len(self._announced)

    def expect(self, role: Role, address: str) -> None:
        """Expect this role's key at an address, until `forget`."""
        self._announced[address] = role

    def forget(self, address: str) -> None:
        """Forget the role that peers gave for an address."""
        self._announced.pop(address, None)

    def key_at(self, address: str) -> Role | None:
        """Return the role whose key is expected at an address; None if any key will do."""
        return self._announced.get(address) or self.dialled.get(address)

    def allowed(self, key: Role | None, role: Role, address: str = "") -> bool:
        """Return whether the holder of role `key`'s key may claim the role `role` and listen at `address`.

        The configuration of an address takes precedence over a Hello.
        """
        if self._security is None:
            return True
        return self._security.may_claim(key, role) and self.dialled.get(address) in {None, key}


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

    def add(self, key: Role | None, envelope: bytes, peer: str) -> None:
        """Cache the peer of an envelope, within the bounds."""
        shown = self._shown.setdefault(peer, [])
        if len(shown) < MAX_PER_PEER and len(envelope) <= MAX_ENVELOPE_BYTES:
            shown.append((key, envelope))
            self._peers[key, envelope] = peer

    def forget(self, peer: str) -> None:
        """Drop the envelopes of a peer."""
        for each in self._shown.pop(peer, ()):
            del self._peers[each]
