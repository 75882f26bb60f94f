"""Poller of a node: waits at one descriptor for its inbox, its connections, and wake-ups from other threads."""

import contextlib
import os
import selectors
import threading
from collections.abc import Iterable
from enum import Enum, auto


class _Kind(Enum):
    INBOX = auto()
    CONNECTION = auto()
    WAKEUP = auto()


class Poller:
    """Poller of ZeroMQ's edge-triggered descriptors: after a wake-up, read until nothing is left.

    Belongs to one thread; any other may call `wake`.
    """

    def __init__(self, inbox: Iterable[int]) -> None:
        self._selector = selectors.DefaultSelector()
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        self._lock = threading.Lock()
        self._closed = False
        self._unread = False
        """A new connection is watched whose events were not read yet: ZeroMQ signals only after a read that found
        none."""
        os.set_blocking(self._wakeup_reader, False)
        os.set_blocking(self._wakeup_writer, False)
        self._selector.register(self._wakeup_reader, selectors.EVENT_READ, _Kind.WAKEUP)
        for descriptor in inbox:
            self._selector.register(descriptor, selectors.EVENT_READ, _Kind.INBOX)

    def fileno(self) -> int:
        """Return a descriptor that is readable when `wait` would not wait."""
        return self._selector.fileno()

    def watch(self, connection: int) -> None:
        """Also wait for events of a connection."""
        self._selector.register(connection, selectors.EVENT_READ, _Kind.CONNECTION)
        self._unread = True

    def unwatch(self, connection: int) -> None:
        """Stop watching a connection; call it before closing the connection."""
        self._selector.unregister(connection)

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for any event; return whether connections have events."""
        changed, self._unread = self._unread, False
        for key, _ in self._selector.select(0 if changed else max(0.0, seconds)):
            changed |= key.data is _Kind.CONNECTION
            if key.data is _Kind.WAKEUP:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wakeup_reader, 4096)
        return changed

    def wake(self) -> None:
        """Make a waiting `wait` return, or the next one not wait."""
        with self._lock, contextlib.suppress(BlockingIOError):  # a full pipe is readable already
            if not self._closed:
                os.write(self._wakeup_writer, b"\0")

    def close(self) -> None:
        """Close the poller. Repeated calls are harmless."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._selector.close()
            os.close(self._wakeup_reader)
            os.close(self._wakeup_writer)
