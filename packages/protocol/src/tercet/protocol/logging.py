"""A voice for what others can cause as often as they like: it never fills a disk."""

import logging


class RateLimitedLogger:
    """Warnings of one logger, no more than one in `interval` seconds. For one thread at a time."""

    def __init__(self, logger: logging.Logger, interval: float) -> None:
        self._logger = logger
        self._interval = interval
        self._next = float("-inf")
        self._unsaid = 0

    def say(self, what: str, now: float) -> None:
        """Log it, or hold it back; the next line says how many were held back."""
        if now < self._next:
            self._unsaid += 1
            return
        self._next = now + self._interval
        self._logger.warning("%s%s", what, f" (and {self._unsaid} more)" if self._unsaid else "")
        self._unsaid = 0
