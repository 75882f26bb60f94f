"""Configuration of a node: its identity, addresses, peers and timing."""

from dataclasses import dataclass
from typing import NamedTuple

from tercet.protocol.errors import AddressError
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.endpoints import (
    Ipc,
    Reach,
    bind_address,
    check_dialable,
    check_peer_id,
    check_spec,
    parse,
)
from tercet.protocol.transport.security import Security


class Dial(NamedTuple):
    """Spec to dial, with the role whose key is expected there."""

    role: Role
    spec: str


@dataclass(frozen=True)
class NodeConfig:
    """Configuration of one node. Raises AddressError or ValueError for settings that can never work."""

    role: Role
    peer: str
    """Peer id: unique among living processes, the same after a restart."""
    listen: str
    """`ipc:///private/dir`, a directory in which the node creates its socket, or `tcp://host:port` (port 0: any free
    one)."""
    connect: tuple[str | Dial, ...] = ()
    """Specs of the peers to dial: addresses, `ipc:///dir/scheduler-*` patterns, or `tcp://name:port`. With keys,
    tcp:// needs a `Dial`, since a CURVE connection starts with the server's public key."""
    supervisor: str = ""
    """Spec of the supervisor to report to."""
    advertise: str = ""
    """Address announced to peers; by default the bound one, or for a wildcard the local address of the route to each
    peer."""
    heartbeat_interval: float = 0.25
    """Seconds between heartbeats."""
    silence: float = 2.0
    """Seconds without a message after which a peer counts as dead."""
    queue: int = 1000
    """Messages that may wait in each socket."""
    max_pending: int = 10_000
    """Deliveries that may wait for the main thread; beyond it the inbox is not read and senders see full queues."""
    max_peers: int = 1024
    security: Security | None = None
    """CURVE keys. Required for tcp://; not needed for ipc://."""
    insecure_loopback: bool = False
    """Allow tcp:// without keys on loopback, where any user of this machine can connect."""

    def __post_init__(self) -> None:
        check_peer_id(self.peer)
        if self.security and self.role not in {self.security.role, Role.SUPERVISOR}:
            raise ValueError(f"a {self.role.value} cannot use the keys of a {self.security.role.value}")
        bind_address(self.listen, self.peer, "0" * 16, self.reach)
        for spec, role in self.specs.items():
            target = check_spec(spec, self.reach)
            if self.security and role is None and not isinstance(target, Ipc):
                raise AddressError(f"{spec}: whose key is expected there?")
        if self.advertise:
            check_dialable(self.advertise, self.reach)
        if not 0 < self.heartbeat_interval < self.silence:
            raise ValueError(
                f"heartbeats every {self.heartbeat_interval} s cannot prove life within {self.silence} s of silence"
            )

    @property
    def reach(self) -> Reach:
        """Network reach allowed for tcp:// addresses."""
        if self.security:
            return Reach.ANYWHERE
        return Reach.LOOPBACK if self.insecure_loopback else Reach.NOWHERE

    @property
    def requires_keys(self) -> bool:
        """Return whether every sender to the inbox has been authenticated by a key."""
        return self.security is not None and not isinstance(parse(self.listen), Ipc)

    @property
    def specs(self) -> dict[str, Role | None]:
        """Specs to dial, with the roles expected there as far as they are known."""
        specs = dict((dial.spec, dial.role) if isinstance(dial, Dial) else (dial, None) for dial in self.connect)
        return specs | {self.supervisor: Role.SUPERVISOR} if self.supervisor else specs
