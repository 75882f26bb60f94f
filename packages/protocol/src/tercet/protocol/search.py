"""Warnings while a node has no link to its supervisor; it keeps trying."""

from tercet.protocol.membership.peers import PeerTable
from tercet.protocol.messages.values import Role

PATIENCE = 30.0
"""Seconds without a link to the supervisor before the first warning, and between two."""


class Search:
    """Timer of one node's warnings. `spec` is the supervisor's address; if empty, there are none."""

    def __init__(self, spec: str, now: float) -> None:
        self._spec = spec
        self._since = self._told = now

    def complaint(self, table: PeerTable, now: float) -> str:
        """Return a warning if one is due: the supervisor's address, and the state of all links."""
        if not self._spec or any(peer.hello.role is Role.SUPERVISOR for peer in table.peers.values()):
            self._since = self._told = now
        if now - self._told < PATIENCE:
            return ""
        self._told = now
        links = "; ".join(map(str, table.links.values())) or "there is nobody to greet"
        return f"no supervisor at {self._spec} for {now - self._since:.0f} s: {links}"
