"""Rate-limited warnings: at most one log line per interval, plus a count of those suppressed."""

import logging


class RateLimitedLogger:
    """Logger of at most one warning per `interval` seconds. Not thread-safe."""

    def __init__(self, logger: logging.Logger, interval: float) -> None:
        self._logger = logger
        self._interval = interval
        self._next = float("-inf")
        self._suppressed = 0

    def warn(self, what: str, now: float) -> None:
        """Log a warning or suppress it; the next line says how many were suppressed."""
        if now < self._next:
            self._suppressed += 1
            return
        self._next = now + self._interval
        self._logger.warning("%s%s", what, f" (and {self._suppressed} more)" if self._suppressed else "")
        self._suppressed = 0
