"""Heartbeats from a thread while a process's event loop is busy; they report the length of the stall."""

import threading
import time
from collections.abc import Callable


class Stall:
    """Measurement of a loop's lateness by periodic observations.

    Time between two distant observations is limited to `max_gap`: the process was suspended, and its loop with
    it.
    """

    def __init__(self, max_gap: float) -> None:
        self._max_gap = max_gap
        self._observed = float("-inf")
        self.age = 0.0
        self.longest = 0.0
        """Longest stall that has ended, in seconds."""

    def observe(self, now: float, due: float) -> None:
        """Observe the loop at a time when work is due since `due`."""
        late = now - due
        if late <= 0:
            self.longest, self.age = max(self.longest, self.age), 0.0
        else:
            self.age += min(late, now - self._observed, self._max_gap)
        self._observed = now


class StallWatch:
    """Daemon thread that calls `repeat(age, longest)` while the loop is over `interval` late for its heartbeat.

    `due` returns the time of that heartbeat. Both are called in the thread.
    """

    def __init__(
        self,
        due: Callable[[], float],
        repeat: Callable[[float, float], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._due = due
        self._repeat = repeat
        self._interval = interval
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tercet-heartbeats", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread without waiting for it."""
        self._ended.set()

    def _run(self) -> None:
        stall = Stall(4 * self._interval)
        while not self._ended.wait(max(self._interval, self._due() + self._interval - self._clock())):
            stall.observe(self._clock(), self._due() + self._interval)
            if stall.age:
                self._repeat(stall.age, stall.longest)
