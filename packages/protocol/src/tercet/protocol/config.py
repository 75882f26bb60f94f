"""Who a node is, where it listens, and how patient it is."""

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
    """A spec to dial, and the role whose key is expected there."""

    role: Role
    spec: str


@dataclass(frozen=True)
class NodeConfig:
    """One process among its peers. Raises AddressError or ValueError for what could never work."""

    role: Role
    peer: str
    """Its id: unique among living processes, the same after a restart."""
    listen: str
    """`ipc:///private/dir`, where it makes its own socket, or `tcp://host:port` (port 0 takes a free one)."""
    connect: tuple[str | Dial, ...] = ()
    """Specs of the peers to dial: addresses, `ipc:///dir/scheduler-*` patterns, or `tcp://name:port`.

    Under keys, tcp:// needs a `Dial`, since a connection begins with the key of whoever is called.
    """
    supervisor: str = ""
    """Spec of the supervisor to report to."""
    advertise: str = ""
    """The address peers are told; by default the one bound, or for a wildcard that of the route to each peer."""
    heartbeat_interval: float = 0.25
    """Seconds."""
    silence: float = 2.0
    """Seconds without a word after which a peer is taken for dead."""
    queue: int = 1000
    """Messages that may wait in each socket."""
    max_peers: int = 1024
    security: Security | None = None
    """The keys without which there is no tcp://; ipc:// needs none."""
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
        """How far tcp:// may go."""
        if self.security:
            return Reach.ANYWHERE
        return Reach.LOOPBACK if self.insecure_loopback else Reach.NOWHERE

    @property
    def guarded(self) -> bool:
        """Whether whoever speaks to the inbox has shown a key."""
        return self.security is not None and not isinstance(parse(self.listen), Ipc)

    @property
    def specs(self) -> dict[str, Role | None]:
        """Everything to dial, and the roles expected there as far as they are known."""
        specs = dict((dial.spec, dial.role) if isinstance(dial, Dial) else (dial, None) for dial in self.connect)
        return specs | {self.supervisor: Role.SUPERVISOR} if self.supervisor else specs
