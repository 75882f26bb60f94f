"""Options of a detokenizer process."""

from dataclasses import dataclass, field

from cyclopts import Parameter

from tercet.detokenizer.errors import ConfigError
from tercet.protocol.messages.values import Role
from tercet.protocol.options import NodeOptions
from tercet.protocol.transport.endpoints import default_peer


@Parameter(name="*", negative="")
@dataclass(frozen=True, kw_only=True)
class DetokenizerConfig(NodeOptions):
    """Identity, addresses and limits of a detokenizer process."""

    peer: str = field(default_factory=lambda: default_peer(Role.DETOKENIZER))
    listen: str = "tcp://127.0.0.1:30200"
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
