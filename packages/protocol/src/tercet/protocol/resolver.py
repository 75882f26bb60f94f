"""Keeps the meaning of address specs up to date without ever waiting for a name server."""

import threading

from tercet.protocol.endpoints import Tcp, parse, resolve

INTERVAL = 0.5
"""Seconds between looks."""


class Resolver:
    """What a list of specs stands for. Files are looked at in place; DNS names in a short-lived thread of their own."""

    def __init__(self, specs: tuple[str, ...]) -> None:
        names = [spec for spec in specs if isinstance(target := parse(spec), Tcp) and not target.is_literal]
        self._local = [spec for spec in specs if spec not in names]
        self._names = names
        self._found: set[str] = set()
        self._thread: threading.Thread | None = None
        self._due = float("-inf")

    def poll(self, now: float) -> set[str] | None:
        """Every address, if it is time to look again."""
        if now < self._due:
            return None
        self._due = now + INTERVAL
        if self._names and not (self._thread and self._thread.is_alive()):
            self._thread = threading.Thread(target=self._look_up, name="tercet-resolver", daemon=True)
            self._thread.start()
        return self._found.union(*map(resolve, self._local))

    def _look_up(self) -> None:
        self._found = set().union(*map(resolve, self._names))
