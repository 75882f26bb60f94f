"""Rules of the handshake: roles, versions and introductions."""

from tercet.protocol.errors import IncompatiblePeer
from tercet.protocol.messages.messages import Hello
from tercet.protocol.messages.values import WIRE_VERSION, Role
from tercet.protocol.transport.endpoints import Reach, check_dialable, check_peer_id

_INTRODUCED = {Role.SCHEDULER: Role.DETOKENIZER, Role.DETOKENIZER: Role.SCHEDULER}
"""Roles that a frontend introduces to each other."""


def check_hello(hello: Hello, reach: Reach) -> None:
    """Refuse a Hello: AddressError for an impossible id or address, IncompatiblePeer for another major version."""
    check_peer_id(hello.peer)
    check_dialable(hello.address, reach)
    if hello.version[0] != WIRE_VERSION[0]:
        ours, theirs = (".".join(map(str, version)) for version in (WIRE_VERSION, hello.version))
        raise IncompatiblePeer(f"{hello.peer} speaks wire version {theirs}, this part speaks {ours}")


def should_meet(one: Role, other: Role) -> bool:
    """Return whether a frontend introduces peers of these roles to each other."""
    return _INTRODUCED.get(one) == other
