"""Waits, at one descriptor, for whatever a node has to look at: its inbox, its connections, and a bell."""

import contextlib
import os
import selectors
import threading
from collections.abc import Iterable
from enum import Enum, auto


class _Kind(Enum):
    INBOX = auto()
    CONNECTION = auto()
    BELL = auto()


class Poller:
    """ZeroMQ's descriptors are edge-triggered: what waked us must be read until there is nothing left.

    Belongs to one thread; any other may `ring`.
    """

    def __init__(self, inbox: Iterable[int]) -> None:
        self._selector = selectors.DefaultSelector()
        self._bell, self._cord = os.pipe()
        self._lock = threading.Lock()
        self._closed = False
        self._unread = False
        """A connection is watched that nobody has asked for news yet: until one has and got none, ZeroMQ is silent."""
        os.set_blocking(self._bell, False)
        os.set_blocking(self._cord, False)
        self._selector.register(self._bell, selectors.EVENT_READ, _Kind.BELL)
        for descriptor in inbox:
            self._selector.register(descriptor, selectors.EVENT_READ, _Kind.INBOX)

    def fileno(self) -> int:
        """Readable when `wait` would not have to wait."""
        return self._selector.fileno()

    def watch(self, connection: int) -> None:
        """Also wait for news of a connection."""
        self._selector.register(connection, selectors.EVENT_READ, _Kind.CONNECTION)
        self._unread = True

    def unwatch(self, connection: int) -> None:
        """No longer; before it is closed."""
        self._selector.unregister(connection)

    def wait(self, seconds: float) -> bool:
        """Until anything happens, at most so long. Whether there is news of a connection."""
        news, self._unread = self._unread, False
        for key, _ in self._selector.select(0 if news else max(0.0, seconds)):
            news |= key.data is _Kind.CONNECTION
            if key.data is _Kind.BELL:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell, 4096)
        return news

    def ring(self) -> None:
        """Make a `wait` return, or the next one not wait."""
        with self._lock, contextlib.suppress(BlockingIOError):  # a pipe that is full rings already
            if not self._closed:
                os.write(self._cord, b"\0")

    def close(self) -> None:
        """Watch nothing any more. Harmless when called again."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._selector.close()
            os.close(self._bell)
            os.close(self._cord)
