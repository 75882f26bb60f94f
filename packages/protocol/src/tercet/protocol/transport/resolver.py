"""Resolver of address specs that never waits for a name server."""

import threading
from collections.abc import Mapping

from tercet.protocol.messages.values import Role
from tercet.protocol.transport.endpoints import Tcp, parse, resolve

INTERVAL = 0.5
"""Seconds between two resolutions."""
NAME_INTERVAL = 2.0
"""Seconds between two queries to a name server."""


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
        self._due = now + INTERVAL
        if self._names and now >= self._names_due and not (self._thread and self._thread.is_alive()):
            self._names_due = now + NAME_INTERVAL
            self._thread = threading.Thread(target=self._look_up, name="tercet-resolver", daemon=True)
            self._thread.start()
        if self._thread and self._thread.is_alive():
            self._due = now + INTERVAL / 10
        return self._found | self._resolve(self._local)

    def _look_up(self) -> None:
        self._found = self._resolve(self._names)

    def _resolve(self, specs: list[str]) -> dict[str, Role | None]:
        return {address: self._roles[spec] for spec in specs for address in resolve(spec)}
