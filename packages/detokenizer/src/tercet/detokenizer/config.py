"""What a detokenizer process can be told, on its command line."""

from dataclasses import dataclass
from typing import Literal

from cyclopts import Parameter

from tercet.detokenizer.errors import ConfigError


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DetokenizerConfig:
    """Who this process is, and its limits."""

    peer: str = "detokenizer-0"
    """Name among the peers; a restarted process keeps it."""
    listen: str = "tcp://127.0.0.1:30200"
    """Address of the inbox: ipc://DIRECTORY or tcp://HOST:PORT."""
    advertise: str = ""
    """Address that peers should use instead of the one listened on."""
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
    drain_seconds: float = 2.0
    """How long the last messages may take to leave after SIGTERM."""

    def __post_init__(self) -> None:
        for option in ("max_choices", "max_backlog"):
            if getattr(self, option) < 1:
                raise ConfigError(f"--{option.replace('_', '-')} must be at least 1")
        if not 0 <= self.drain_seconds < 3600:
            raise ConfigError("--drain-seconds must be between 0 and 3600")
