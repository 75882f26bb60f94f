"""A loader that checks new weights before the old ones are released, so that no step waits for the check."""

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future

from tercet.protocol.json_files import error_line
from tercet.scheduler.reading_threads import ReadingThreads

logger = logging.getLogger(__name__)

_TIMEOUT = 600.0
"""Timeout in seconds for checking a checkpoint. It reads headers and tied tensors."""


class WeightsLoader:
    """The `WeightsReader` port. Results are not cached, because the files at a path may change."""

    def __init__(self, check: Callable[[str], None], timeout: float = _TIMEOUT) -> None:
        """Create a loader; `check` raises for a directory whose weights cannot be loaded, with any exception."""
        self._check = check
        self._checks: dict[str, Future[None]] = {}
        self._thread = ReadingThreads[None](1, "look at weights", timeout)

    @property
    def busy(self) -> bool:
        """Return whether `take_read` has a result, now or later."""
        return bool(self._checks)

    def want(self, path: str) -> None:
        """Check the weights at a path, unless a check of it is running."""
        if path not in self._checks:
            self._checks[path] = self._thread.submit(self._check, path)

    def take_read(self) -> Collection[tuple[str, str]]:
        """Return each checked path with the reason why its weights cannot be loaded; empty if they can."""
        over = {path: look for path, look in self._checks.items() if look.done()}
        for path in over:
            del self._checks[path]
        return [(path, _fault(look)) for path, look in over.items()]

    def close(self) -> None:
        """Stop checking."""
        self._thread.close()


def _fault(look: Future[None]) -> str:
    error = look.exception()
    if error is None:
        return ""
    if isinstance(error, ValueError | OSError):
        return error_line(error)
    logger.warning("weights: check failed", exc_info=error)
    return f"its files cannot be read: {type(error).__name__}: {error_line(error)}"
