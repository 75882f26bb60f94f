"""How long a node has looked for its supervisor in vain: it goes on looking, but says so."""

from tercet.protocol.membership.peers import PeerTable
from tercet.protocol.messages.values import Role

PATIENCE = 30.0
"""Seconds without a link to the supervisor before the first word of it, and between two."""


class Search:
    """Belongs to one node; `spec` is where the supervisor should be, nothing where there is none to look for."""

    def __init__(self, spec: str, now: float) -> None:
        self._spec = spec
        self._since = self._told = now

    def complaint(self, table: PeerTable, now: float) -> str:
        """What to say of it now, if anything: where it was looked for, and how far that came."""
        if not self._spec or any(peer.hello.role is Role.SUPERVISOR for peer in table.peers.values()):
            self._since = self._told = now
        if now - self._told < PATIENCE:
            return ""
        self._told = now
        links = "; ".join(map(str, table.links.values())) or "there is nobody to greet"
        return f"no supervisor at {self._spec} for {now - self._since:.0f} s: {links}"
