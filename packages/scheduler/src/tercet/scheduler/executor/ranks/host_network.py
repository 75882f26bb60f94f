"""Network of the hosts of one model: the address of host 0, the keys of the links, and versions that must be equal."""

import socket
from dataclasses import dataclass
from importlib.metadata import version

from tercet.protocol.errors import AddressError
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.channel import Bounds, Context, Inbox, Outbox, Received
from tercet.protocol.transport.endpoints import Reach, Tcp, address_towards, check_spec
from tercet.protocol.transport.security import Security
from tercet.scheduler.__about__ import __version__
from tercet.scheduler.config import ConfigError, HostOptions, ProcessOptions

BOUNDS = Bounds(queue=256)
"""Limits of a link: host 0 plans a few steps ahead, and heartbeats are few."""


class HostsError(ConfigError):
    """The hosts of a model cannot meet. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """The links of one host to the other hosts of its model. All hosts hold the schedulers' keys."""

    hosts: int
    """Number of hosts; 0 if only host 0 knows it."""
    address: str
    """Address of host 0, tcp://HOST:PORT, as the operator wrote it."""
    timeout: float
    """Seconds in which the hosts must meet."""
    security: Security | None = None

    @classmethod
    def of(cls, process: ProcessOptions, hosts: HostOptions) -> "HostNetwork | None":
        """Return the network that the options describe; None for one host. Raise ConfigError, KeysError."""
        if hosts.nnodes == 1 and not hosts.node_rank:
            return None
        if not hosts.dist_init_addr:
            raise ConfigError("--nnodes and --node-rank need --dist-init-addr HOST:PORT, an address of host 0")
        address = f"tcp://{hosts.dist_init_addr}"
        security = Security.load(process.keys, Role.SCHEDULER) if process.keys else None
        loopback = Reach.LOOPBACK if process.insecure_loopback else Reach.NOWHERE
        try:
            target = check_spec(address, Reach.ANYWHERE if security else loopback)
        except AddressError as error:
            raise ConfigError(f"--dist-init-addr {hosts.dist_init_addr}: {error}") from error
        if not isinstance(target, Tcp) or target.is_wildcard or not target.port:
            raise ConfigError(f"--dist-init-addr {hosts.dist_init_addr}: give an address and a port of host 0")
        return cls(hosts=hosts.nnodes, address=address, timeout=hosts.dist_timeout, security=security)

    def resolve(self) -> Tcp:
        """Return the address of host 0 with a number as its host. Raise AddressError if the name is not known."""
        target = check_spec(self.address, Reach.ANYWHERE)
        assert isinstance(target, Tcp)
        if target.is_literal:
            return target
        try:
            found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise AddressError(f"{self.address}: {error.strerror}") from error
        return Tcp(str(found[0][4][0]), target.port)

    def listen(self, context: Context, address: str) -> Inbox:
        """Return an inbox of this host. Raise ChannelError."""
        return Inbox(context, address, BOUNDS, self.security)

    def dial(self, context: Context, address: str) -> Outbox:
        """Return an outbox to another host. Raise AddressError."""
        return Outbox(context, address, BOUNDS, self.security, Role.SCHEDULER)

    def admits(self, received: Received) -> bool:
        """Return whether the sender of a message holds the schedulers' key, if there are keys."""
        return self.security is None or received.role is Role.SCHEDULER


def local_address(host_0: Tcp) -> str:
    """Return the address of this host on the route to host 0. Raise AddressError if there is no route."""
    here = check_spec(address_towards(str(host_0), str(Tcp(_wildcard(host_0), 0))), Reach.ANYWHERE)
    assert isinstance(here, Tcp)
    return here.host


def _wildcard(target: Tcp) -> str:
    return "::" if ":" in target.host else "0.0.0.0"  # noqa: S104 - it stands for the route's address, and is not bound


def software() -> str:
    """Return the versions that all hosts of a model must have: plans and collectives have one for each."""
    return f"tercet-scheduler {__version__}, torch {version('torch').partition('+')[0]}"
