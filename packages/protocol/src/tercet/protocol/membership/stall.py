"""Heartbeats of a part whose event loop is busy: they come from a thread, and say for how long nothing else has run."""

import threading
import time
from collections.abc import Callable


class Stall:
    """How long a loop has been late for what is due, as one sees it who looks every now and then.

    Time between two looks that are far apart does not count: the process was stopped, and its loop with it.
    """

    def __init__(self, most: float) -> None:
        """`most` is the longest time between two looks that counts, in seconds."""
        self._most = most
        self._looked = float("-inf")
        self.age = 0.0
        self.longest = 0.0
        """Of the stalls that have ended."""

    def look(self, now: float, due: float) -> None:
        """Take a look, at a time when the loop has something to do that is due since `due`."""
        late = now - due
        if late <= 0:
            self.longest, self.age = max(self.longest, self.age), 0.0
        else:
            self.age += min(late, now - self._looked, self._most)
        self._looked = now


class StallWatch:
    """A daemon thread that calls `beat(age, longest)` while the loop is more than `interval` late for its next beat.

    `due` gives the time of that beat. Both are called in the thread.
    """

    def __init__(
        self,
        due: Callable[[], float],
        beat: Callable[[float, float], None],
        interval: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._due = due
        self._beat = beat
        self._interval = interval
        self._clock = clock
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tercet-heartbeats", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; does not wait for it."""
        self._ended.set()

    def _run(self) -> None:
        stall = Stall(4 * self._interval)
        while not self._ended.wait(max(self._interval, self._due() + self._interval - self._clock())):
            stall.look(self._clock(), self._due() + self._interval)
            if stall.age:
                self._beat(stall.age, stall.longest)
