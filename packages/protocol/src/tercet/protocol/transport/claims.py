"""Whose key is expected at an address, and what the holder of a key may say of itself."""

from collections.abc import Mapping

from tercet.protocol.messages.values import Role
from tercet.protocol.transport.security import Security


class PeerAuthorizer:
    """Belongs to one node. Without `security` everybody may claim anything."""

    def __init__(self, security: Security | None) -> None:
        self._security = security
        self.dialled: Mapping[str, Role | None] = {}
        """Roles by address, as the configuration says."""
        self._told: dict[str, Role] = {}
        """Roles by address, as peers told us."""

    def __len__(self) -> int:
        return len(self._told)

    def expect(self, role: Role, address: str) -> None:
        """Expect this role's key at an address, until `forget`."""
        self._told[address] = role

    def forget(self, address: str) -> None:
        """Forget what peers told us of an address."""
        self._told.pop(address, None)

    def key_at(self, address: str) -> Role | None:
        """The role whose key is expected at an address; None where any will do."""
        return self._told.get(address) or self.dialled.get(address)

    def allowed(self, key: Role | None, role: Role, address: str = "") -> bool:
        """Whether whoever shows the key of role `key` may say that it is of the role `role`, and listens at an address.

        What our configuration says of an address is not undone by a Hello.
        """
        if self._security is None:
            return True
        return self._security.may_claim(key, role) and self.dialled.get(address) in {None, key}
