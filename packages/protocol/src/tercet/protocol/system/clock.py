"""Monotonic clock that leaves out time the process was suspended."""

import threading
import time
from collections.abc import Callable

PAUSE = 2.0
"""Seconds between two readings after which the process counts as suspended."""


class SuspendAwareClock:
    """Clock of the seconds in which this process ran. Thread-safe; read it more often than every `pause` seconds.

    A longer gap between two readings means that the process, or its machine, was suspended. Counting that time would
    make pending work look stuck, and clients look as if they had waited that long.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, pause: float = PAUSE) -> None:
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()
        self._read = clock()
        self._slept = 0.0

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            if now - self._read > self._pause:
                self._slept += now - self._read
            self._read = now
            return now - self._slept
