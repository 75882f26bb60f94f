"""`WeightsLoader`: looks at weights before the old ones are given up for them, so that no step waits for it."""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future

from tercet.protocol.json_files import error_line
from tercet.scheduler.reading_threads import ReadingThreads

logger = logging.getLogger(__name__)

_PATIENCE = 600.0
"""Seconds to look at a checkpoint. It is headers that are read, and what is tied."""


class WeightsLoader:
    """The `WeightsReader` port. Nothing is remembered: what lies at a path may be something else by the next time."""

    def __init__(self, check: Callable[[str], None], patience: float = _PATIENCE) -> None:
        """`check` raises for a directory whose weights cannot be loaded, whatever its files make it raise."""
        self._check = check
        self._looks: dict[str, Future[None]] = {}
        self._thread = ReadingThreads[None](1, "look at weights", patience)

    @property
    def busy(self) -> bool:
        """Whether `take_read` has something to tell, now or later."""
        return bool(self._looks)

    def want(self, path: str) -> None:
        """Look at what lies there, unless that goes on already."""
        if path not in self._looks:
            self._looks[path] = self._thread.submit(self._check, path)

    def take_read(self) -> Collection[tuple[str, str]]:
        """Each path that has been looked at, and why its weights cannot be loaded; empty where they can."""
        over = {path: look for path, look in self._looks.items() if look.done()}
        for path in over:
            del self._looks[path]
        return [(path, _fault(look)) for path, look in over.items()]

    def close(self) -> None:
        """Look at nothing more."""
        self._thread.close()


def _fault(look: Future[None]) -> str:
    error = look.exception()
    if error is None:
        return ""
    if isinstance(error, ValueError | OSError):
        return error_line(error)
    logger.warning("weights cannot be read", exc_info=error)
    return f"its files cannot be read: {type(error).__name__}: {error_line(error)}"
