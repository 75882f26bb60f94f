"""Slices of time for a call that takes many times as long as a step: it pauses while steps run."""

import threading
import time
from collections.abc import Callable

_PART = 2.5e8
"""Floating-point operations of a part: a few milliseconds on two cores."""
_LEAST_ROWS = 16
_current = threading.local()


class _CancelledError(BaseException):
    """The call is not needed any more. It ends at its pause."""


class TimeSlices:
    """A thread with one call at a time, which runs only while `run` waits for it.

    A thread of its own, and not a generator, lets any code of a library pause, deep inside a call.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._end = 0.0
        self._call: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._cancelled = self._closed = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None], seconds: float) -> bool:
        """Run `call`, or go on with it if it has begun, for about so many seconds. Return whether it has ended.

        Raise its error. No other call may have begun.
        """
        if self._call is None:
            self._call = call
        self._resume(seconds)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._call is None

    def cancel(self) -> None:
        """End the call that has begun, if there is one."""
        if self._call is not None:
            self._cancelled = True
            self._resume(0.0)
            self._cancelled = False

    def close(self) -> None:
        """End the call that has begun, and the thread."""
        self.cancel()
        if self._thread is not None:
            self._closed = True
            self._go.release()
            self._thread.join()

    def pause(self) -> None:
        """Wait for the next slice if this one is over. The call calls it, by the function of this name."""
        if self._clock() >= self._end:
            self._back.release()
            self._go.acquire()
            if self._cancelled:
                raise _CancelledError

    def _resume(self, seconds: float) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
            self._thread.start()
        self._end = self._clock() + seconds
        self._go.release()
        self._back.acquire()

    def _work(self) -> None:
        _current.slices = self
        while True:
            self._go.acquire()
            if self._closed:
                return
            try:
                if self._call is not None:
                    self._call()
            except _CancelledError:
                pass
            except BaseException as error:  # `run` raises it
                self._error = error
            self._call = None
            self._back.release()


def pause() -> None:
    """Pause the call of this thread if its slice of time is over. In a thread without slices do nothing."""
    slices: TimeSlices | None = getattr(_current, "slices", None)
    if slices is not None:
        slices.pause()


def rows_of_part(operations: int) -> int:
    """Return the rows of a part of the work between two pauses, for the floating-point operations of a row."""
    return max(_LEAST_ROWS, int(_PART / operations))
