"""Authorization of peers: the key expected at an address, and the roles that the holder of a key may claim."""

from collections.abc import Mapping

from tercet.protocol.messages.values import Role
from tercet.protocol.transport.security import Security


class PeerAuthorizer:
    """Authorizer of one node. Without `security` every claim is allowed."""

    def __init__(self, security: Security | None) -> None:
        self._security = security
        self.dialled: Mapping[str, Role | None] = {}
        """Roles by address, from the configuration."""
        self._told: dict[str, Role] = {}
        """Roles by address, from peers."""

    def __len__(self) -> int:
        return len(self._told)

    def expect(self, role: Role, address: str) -> None:
        """Expect this role's key at an address, until `forget`."""
        self._told[address] = role

    def forget(self, address: str) -> None:
        """Forget the role that peers gave for an address."""
        self._told.pop(address, None)

    def key_at(self, address: str) -> Role | None:
        """Return the role whose key is expected at an address; None if any key will do."""
        return self._told.get(address) or self.dialled.get(address)

    def allowed(self, key: Role | None, role: Role, address: str = "") -> bool:
        """Return whether the holder of role `key`'s key may claim the role `role` and listen at `address`.

        The configuration of an address takes precedence over a Hello.
        """
        if self._security is None:
            return True
        return self._security.may_claim(key, role) and self.dialled.get(address) in {None, key}
