"""Thread pool for reading unchecked files, whose threads can be abandoned."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_MOST_LOST = 64
"""Limit of abandoned threads. A file system that does not answer may keep each of them."""


class ReadTimeoutError(TimeoutError):
    """A read that did not end in time. The message is one line for clients."""


class ReadingThreads(Generic[T]):
    """Pool of at most `most` threads. A call that takes longer than `patience` seconds is abandoned with its thread.

    Its future then raises ReadTimeoutError, another thread takes its place, and neither `close` nor the end of the
    process waits for it. Submitted calls wait for a free thread in order.
    """

    def __init__(self, most: int, name: str, patience: float) -> None:
        self._most = most
        self._name = name
        self._patience = patience
        self._line: deque[tuple[Future[T], Callable[[], T]]] = deque()
        self._running = 0
        self._lost = 0
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[..., T], *given: Any) -> "Future[T]":
        """Return the future of a call. Thread-safe."""
        future: Future[T] = Future()
        with self._lock:
            self._line.append((future, lambda: call(*given)))
        self._start_more()
        return future

    def close(self) -> None:
        """Start no more calls, and cancel the queued ones. Running calls continue, and are not waited for."""
        with self._lock:
            self._closed = True
            waiting = [future for future, _ in self._line]
            self._line.clear()
        for future in waiting:
            future.cancel()

    def _start_more(self) -> None:
        while True:
            with self._lock:
                if not self._line or self._running >= self._most or self._closed:
                    return
                future, call = self._line.popleft()
                stuck = self._lost >= _MOST_LOST
                self._running += not stuck
            if stuck:
                future.set_exception(ReadTimeoutError(f"{_MOST_LOST} reads before this one have not ended"))
            elif future.set_running_or_notify_cancel():
                _Reading(self, future, call)
            else:
                self._ended()

    def _ended(self, *, late: bool = False) -> None:
        with self._lock:
            if late:
                self._lost -= 1
            else:
                self._running -= 1
        self._start_more()

    def _gave_up(self) -> None:
        with self._lock:
            self._running -= 1
            self._lost += 1
        self._start_more()


class _Reading(Generic[T]):
    """A call in a thread of its own, and a timer that abandons it."""

    def __init__(self, threads: ReadingThreads[T], future: "Future[T]", call: Callable[[], T]) -> None:
        self._threads = threads
        self._future = future
        self._call = call
        self._lock = threading.Lock()
        self._over = False
        self._timer = threading.Timer(threads._patience, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        threading.Thread(target=self._run, name=threads._name, daemon=True).start()

    def _run(self) -> None:
        result: T
        try:
            result = self._call()
        except BaseException as error:  # raised to the caller of `result`
            self._finish(lambda error=error: self._future.set_exception(error))  # type: ignore[misc]
        else:
            self._finish(lambda: self._future.set_result(result))

    def _finish(self, settle: Callable[[], None]) -> None:
        if first := self._is_first():
            self._timer.cancel()
            settle()
        self._threads._ended(late=not first)

    def _give_up(self) -> None:
        if self._is_first():
            self._future.set_exception(
                ReadTimeoutError(f"its files were not read within {self._threads._patience:g} s")
            )
            self._threads._gave_up()

    def _is_first(self) -> bool:
        """Return whether the future has no result or exception yet."""
        with self._lock:
            first, self._over = not self._over, True
        return first
