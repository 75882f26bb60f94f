"""Rate-limited warnings, and counters of link errors that come with them."""

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping

logger = logging.getLogger(__name__)

WARNING_INTERVAL = 1.0
"""Seconds between log lines."""


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


class LinkCounters:
    """Thread-safe counters by name."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._warnings = RateLimitedLogger(logger, WARNING_INTERVAL)

    def count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1

    def add(self, counts: Mapping[str, int]) -> None:
        """Add the counts of an object that is about to be closed."""
        with self._lock:
            self._counts.update(counts)

    def total(self, others: Iterable[Mapping[str, int]]) -> dict[str, int]:
        """Return the sum of these counters and others."""
        with self._lock:
            total = self._counts.copy()
        for other in others:
            total.update(other)
        return dict(total)

    def drop(self, name: str, what: str, now: float) -> None:
        """Count a dropped message and log a warning."""
        self.count(name)
        self.warn(f"dropped {what}", now)

    def warn(self, what: str, now: float) -> None:
        """Log a warning unless one was logged within the last second."""
        self._warnings.warn(what, now)
