"""Time as a process had it: what it slept through does not count."""

import threading
import time
from collections.abc import Callable

PAUSE = 2.0
"""Seconds between two readings after which nobody can have been awake."""


class SuspendAwareClock:
    """Seconds in which this process ran. Call it for the time, from any thread, and more often than every `pause`.

    A longer gap between two readings means that the process was stopped, or its machine with everybody else. To reckon
    with it would make what was under way look stuck, and whoever waits look as if he had waited all that time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, pause: float = PAUSE) -> None:
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        self._read = clock()
        self._slept = 0.0

    def __call__(self) -> float:
        """The time."""
        with self._lock:
            now = self._clock()
            if now - self._read > self._pause:
                self._slept += now - self._read
            self._read = now
            return now - self._slept
