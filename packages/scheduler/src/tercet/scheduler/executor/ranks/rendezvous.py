"""Rendezvous of the ranks of a model: a directory on one machine; a store on rank 0's host, for several hosts."""

import fcntl
import socket
import struct
from pathlib import Path

import msgspec

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915
"""The ioctl that returns an interface's IPv4 address (netdevice(7))."""


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Places that a rank needs to meet the others."""

    directory: str
    """Directory of this host's ranks."""
    store: str = ""
    """HOST:PORT of the store, if there are other hosts. Unlike plans, its traffic has no keys."""
    address: str = LOOPBACK
    """Address of this host, to which sockets of collectives are bound."""
    group: str = "world"
    """Name of a group of ranks, among those that meet at the store."""

    def of_world(self) -> "Rendezvous":
        """Return the rendezvous of all ranks."""
        return self._of_group("world")

    def of_stage(self, number: int, stages: int) -> "Rendezvous":
        """Return the rendezvous of the ranks of one of several pipeline stages."""
        return self if stages == 1 else self._of_group(f"stage-{number}")

    def _of_group(self, group: str) -> "Rendezvous":
        directory = Path(self.directory) / group
        directory.mkdir(mode=0o700, exist_ok=True)
        return msgspec.structs.replace(self, group=group, directory=str(directory))


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address; empty if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
