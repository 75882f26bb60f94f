"""A bound on log lines that clients can cause as many of as they like."""

import time
from collections.abc import Callable

_SECONDS = 60.0


class LogLimit:
    """Lets `most` lines through in a minute, and counts the others. Any number of lines takes the disk of a few."""

    def __init__(self, most: int = 10, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._minute_ends = 0.0
        self._lines = 0
        """That wanted to be logged in this minute."""

    def admit(self) -> int | None:
        """How many lines were left out before this one; None where this one is to be left out, too."""
        now, left_out = self._clock(), 0
        if now >= self._minute_ends:
            left_out = max(0, self._lines - self._most)
            self._minute_ends, self._lines = now + _SECONDS, 0
        self._lines += 1
        return left_out if self._lines <= self._most else None
