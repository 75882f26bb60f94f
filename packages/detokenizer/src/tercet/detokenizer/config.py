"""Options of a detokenizer process."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from tercet.detokenizer.errors import ConfigError
from tercet.protocol.messages.values import Role
from tercet.protocol.transport.endpoints import default_peer


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DetokenizerConfig:
    """Identity, addresses and limits of a detokenizer process."""

    peer: str = field(default_factory=lambda: default_peer(Role.DETOKENIZER))
    """Name among the peers; a restarted process keeps it. By default the host's name tells those of a role apart."""
    listen: str = "tcp://127.0.0.1:30200"
    """Address of the inbox: ipc://DIRECTORY or tcp://HOST:PORT."""
    advertise: str = ""
    """Address that peers should use; by default the one listened on, or that of the route to each peer."""
    keys: Path | None = None
    """Folder of this part's CURVE keys, made by `tercet keys`; without one there is no tcp://."""
    insecure_loopback: Annotated[bool, Parameter(negative="")] = False
    """Allow tcp:// without keys on loopback, where every user of this machine could connect."""
    supervisor: str = ""
    """Address of the supervisor's inbox."""
    parent_fd: int | None = None
    """Exit when this inherited pipe closes."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much to log."""
    max_choices: int = 65536
    """Choices whose text may be under way; past it, those that have waited longest are forgotten."""
    max_backlog: int = 1024
    """Messages kept for a frontend that takes none; past it, its oldest are dropped."""
    drain_grace: float = 10.0
    """Seconds that choices held get to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for option in ("max_choices", "max_backlog"):
            if getattr(self, option) < 1:
                raise ConfigError(f"--{option.replace('_', '-')} must be at least 1")
        if not 0 <= self.drain_grace < 3600:
            raise ConfigError("--drain-grace must be between 0 and 3600")
