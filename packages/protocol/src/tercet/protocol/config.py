"""Who a node is, where it listens, and how patient it is."""

from dataclasses import dataclass

from tercet.protocol.endpoints import bind_address, check_dialable, check_peer_id, check_spec
from tercet.protocol.values import Role


@dataclass(frozen=True)
class NodeConfig:
    """One process among its peers. Raises AddressError or ValueError for what could never work."""

    role: Role
    peer: str
    """Its id: unique among living processes, the same after a restart."""
    listen: str
    """`ipc:///private/dir`, where it makes its own socket, or `tcp://host:port` (port 0 takes a free one)."""
    connect: tuple[str, ...] = ()
    """Specs of the peers to dial: addresses, `ipc:///dir/scheduler-*` patterns, or `tcp://name:port`."""
    supervisor: str = ""
    """Spec of the supervisor to report to."""
    advertise: str = ""
    """The address peers are told; by default the one that was bound."""
    heartbeat_interval: float = 0.25
    """Seconds."""
    silence: float = 2.0
    """Seconds without a word after which a peer is taken for dead."""
    queue: int = 1000
    """Messages that may wait in each socket."""
    max_peers: int = 1024

    def __post_init__(self) -> None:
        check_peer_id(self.peer)
        bind_address(self.listen, self.peer, "0" * 16)
        for spec in self.specs:
            check_spec(spec)
        if self.advertise:
            check_dialable(self.advertise)
        if not 0 < self.heartbeat_interval < self.silence:
            raise ValueError(
                f"heartbeats every {self.heartbeat_interval} s cannot prove life within {self.silence} s of silence"
            )

    @property
    def specs(self) -> tuple[str, ...]:
        """Everything to dial."""
        return (*self.connect, self.supervisor) if self.supervisor else self.connect
