"""Addresses: validation of addresses to bind and dial, and resolution of specs such as `ipc:///dir/scheduler-*`."""

import glob
import ipaddress
import os
import re
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tercet.protocol.errors import AddressError
from tercet.protocol.messages.values import Role

IPC_PATH_LIMIT = 107
"""Bytes of sun_path on Linux, less the terminating zero."""

PEER_ID_LIMIT = 64
"""Characters."""

RESOLVE_INTERVAL = 0.5
"""Seconds between two resolutions."""
NAME_RESOLVE_INTERVAL = 2.0
"""Seconds between two queries to a name server."""
_ANYWHERE = "192.0.2.1"
"""Address in no network (RFC 5737): the route to it is the default route."""

_PEER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_GLOB = re.compile(r"[*?\[]")


class Reach(Enum):
    """Allowed reach of tcp://, by its protection."""

    NOWHERE = "tcp:// needs keys: make them with `tercet keys DIRECTORY` and give each part --keys DIRECTORY/ROLE"
    LOOPBACK = "tcp:// without keys is for loopback only"
    ANYWHERE = ""


@dataclass(frozen=True)
class Ipc:
    """Path on this machine: a directory to listen in, a socket to dial, or a pattern of sockets."""

    path: str

    @property
    def is_pattern(self) -> bool:
        """Return whether the path stands for all sockets that match it."""
        return _GLOB.search(self.path) is not None


@dataclass(frozen=True)
class Tcp:
    """Host and port; the host may be a name that stands for several addresses."""

    host: str
    port: int

    @property
    def is_literal(self) -> bool:
        """Return whether the host is a number, which needs no resolver."""
        return _ip(self.host) is not None

    @property
    def is_loopback(self) -> bool:
        """Return whether the host can only be reached from this machine."""
        number = _ip(self.host)
        return self.host == "localhost" if number is None else number.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Return whether it stands for all of this machine's addresses: to be bound, not dialled."""
        number = _ip(self.host)
        return number is not None and number.is_unspecified

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def parse(address: str) -> Ipc | Tcp:
    """Return the parts of an address or spec.

    Raises AddressError unless it is an absolute ipc:// path or tcp://host:port.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/") or "\0" in path:
            raise AddressError(f"{address!r}: an ipc address needs an absolute path")
        if len(os.fsencode(path)) > IPC_PATH_LIMIT:
            raise AddressError(f"{address!r}: the path is longer than the {IPC_PATH_LIMIT} bytes a socket may have")
        return Ipc(path)
    if matched := _TCP.fullmatch(address):
        port = int(matched[2])
        if port > 65535:
            raise AddressError(f"{address!r}: there is no port {port}")
        return Tcp(matched[1].strip("[]"), port)
    raise AddressError(f"{address!r} is neither ipc:///absolute/path nor tcp://host:port")


def check_peer_id(peer: str) -> str:
    """Return `peer` itself. Raises AddressError unless it can be part of a file name."""
    if not _PEER_ID.fullmatch(peer):
        raise AddressError(f"{peer!r} is no peer id: up to 64 letters, digits, dots, dashes, underscores")
    return peer


def default_peer(role: Role) -> str:
    """Return `scheduler-<host name>`: unique if a machine, pod or container runs one process of the role."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return f"{role}-{host[-(PEER_ID_LIMIT - len(role) - 1) :]}"


def check_spec(spec: str, reach: Reach = Reach.LOOPBACK) -> Ipc | Tcp:
    """Return the parsed spec of peers to dial. Raises AddressError, also for tcp:// beyond reach."""
    target = parse(spec)
    if isinstance(target, Tcp) and reach is not Reach.ANYWHERE and not (reach is Reach.LOOPBACK and target.is_loopback):
        alone = ", or --insecure-loopback where no other user is" if target.is_loopback else ""
        raise AddressError(f"{spec}: {reach.value}{alone}")
    return target


def check_dialable(address: str, reach: Reach = Reach.LOOPBACK) -> str:
    """Return `address` itself. Raises AddressError unless one socket can connect to it."""
    target = check_spec(address, reach)
    if isinstance(target, Ipc) and target.is_pattern:
        raise AddressError(f"{address!r} is a pattern, not one address")
    if isinstance(target, Tcp) and (not target.port or target.is_wildcard):
        raise AddressError(f"{address!r} can be bound, not dialled: name a host and a port")
    return address


def bind_address(listen: str, peer: str, incarnation: str, reach: Reach = Reach.LOOPBACK) -> str:
    """Return the address to bind: `<dir>/<peer>.<incarnation>.ipc` in an ipc:// directory, or the tcp:// itself."""
    target = check_spec(listen, reach)
    if isinstance(target, Tcp):
        return str(target)
    if target.is_pattern:
        raise AddressError(f"{listen!r}: an inbox listens in one directory")
    address = f"ipc://{target.path.rstrip('/')}/{check_peer_id(peer)}.{incarnation}.ipc"
    parse(address)
    return address


def address_towards(peer: str, bound: str) -> str:
    """Return the address at which `peer` reaches an inbox bound to `bound`; a wildcard becomes the route's address.

    Host names are not resolved, since that may take long: they are assumed to be reached by the default route. Raises
    AddressError when there is no route, or no descriptor left to look for one.
    """
    inbox, target = parse(bound), parse(peer)
    if isinstance(inbox, Ipc) or not inbox.is_wildcard or isinstance(target, Ipc):
        return bound
    host = "127.0.0.1" if target.host == "localhost" else target.host if target.is_literal else _ANYWHERE
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, target.port or 1))  # sends nothing
            return str(Tcp(str(probe.getsockname()[0]), inbox.port))
    except OSError as error:
        raise AddressError(f"no route to {peer}: {error}") from error


def resolve(spec: str) -> set[str]:
    """Return the addresses a spec stands for now: sockets that match a pattern, addresses of a DNS name, or itself.

    A name that does not resolve stands for no address. May wait for a name server.
    """
    target = parse(spec)
    if isinstance(target, Ipc):
        if not target.is_pattern:
            return {spec}
        return {f"ipc://{path}" for path in glob.glob(target.path) if path.endswith(".ipc")}
    if target.is_literal:
        return {str(target)}
    try:
        found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {str(Tcp(str(entry[4][0]), target.port)) for entry in found}


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def supervised_id(role: Role, number: int) -> str:
    """Return the peer id of a process that a supervisor starts."""
    return f"{role}-{number}"


def is_supervised_id(peer: str) -> bool:
    """Return whether a supervisor of this machine gave this peer id; ids of other peers have other suffixes."""
    return re.fullmatch(r"[a-z]+-\d+", peer) is not None


class Resolver:
    """Resolver of a list of specs. Files are listed in place; DNS names are resolved in a short-lived thread."""

    def __init__(self, specs: Mapping[str, Role | None]) -> None:
        self._roles = dict(specs)
        names = [spec for spec in specs if isinstance(target := parse(spec), Tcp) and not target.is_literal]
        self._local = [spec for spec in specs if spec not in names]
        self._names = names
        self._found: dict[str, Role | None] = {}
        self._thread: threading.Thread | None = None
        self._due = self._names_due = float("-inf")

    @property
    def deadline(self) -> float:
        """Time at which a name server's answer may be there; new files are found at the next poll."""
        return self._due if self._thread and self._thread.is_alive() else float("inf")

    def poll(self, now: float) -> dict[str, Role | None] | None:
        """Return every address with the role expected there, or None if the interval has not passed."""
        if now < self._due:
            return None
        self._due = now + RESOLVE_INTERVAL
        if self._names and now >= self._names_due and not (self._thread and self._thread.is_alive()):
            self._names_due = now + NAME_RESOLVE_INTERVAL
            self._thread = threading.Thread(target=self._look_up, name="tercet-resolver", daemon=True)
            self._thread.start()
        if self._thread and self._thread.is_alive():
            self._due = now + RESOLVE_INTERVAL / 10
        return self._found | self._resolve(self._local)

    def _look_up(self) -> None:
        self._found = self._resolve(self._names)

    def _resolve(self, specs: list[str]) -> dict[str, Role | None]:
        return {address: self._roles[spec] for spec in specs for address in resolve(spec)}
