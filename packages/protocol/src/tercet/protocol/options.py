"""Command-line options of a node, which every part has."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tercet.protocol.messages.values import Role
from tercet.protocol.system.log_lines import LogFormat, LogLevel, LogSettings, start_logging

if TYPE_CHECKING:
    from tercet.protocol.config import Dial, NodeConfig


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Identity, addresses and keys of a part. Each part adds its own defaults and options."""

    peer: str
    """Name among the peers; a restarted process keeps it. By default the host's name tells those of a role apart."""
    listen: str
    """Address of the inbox: ipc://DIRECTORY or tcp://HOST:PORT."""
    advertise: str = ""
    """Address that peers should use; by default the one listened on, or that of the route to each peer."""
    keys: Path | None = None
    """Folder of this part's CURVE keys, made by `tercet keys`; without one there is no tcp://."""
    insecure_loopback: bool = False
    """Allow tcp:// without keys on loopback, where every user of this machine could connect."""
    supervisor: str = ""
    """Address of the supervisor's inbox, if there is one."""
    parent_fd: int | None = None
    """Exit when this inherited pipe closes."""
    log_level: LogLevel = "info"
    """Least severity that is logged."""
    log_format: LogFormat = "text"
    """Format of log lines: text, or one JSON object a line."""

    def start_logging(self) -> None:
        """Log to stderr as configured."""
        level = logging.getLevelNamesMapping()[self.log_level.upper()]
        start_logging(LogSettings(level, self.log_format, self.peer))

    def node_config(self, role: Role, connect: "tuple[str | Dial, ...]" = ()) -> "NodeConfig":
        """Return the configuration of the node, with its keys. Raises KeysError, AddressError, ValueError."""
        from tercet.protocol.config import NodeConfig  # not above: `--help` needs no ZeroMQ
        from tercet.protocol.transport.security import Security

        return NodeConfig(
            role=role,
            peer=self.peer,
            listen=self.listen,
            connect=connect,
            supervisor=self.supervisor,
            advertise=self.advertise,
            security=Security.load(self.keys, role) if self.keys else None,
            insecure_loopback=self.insecure_loopback,
        )
