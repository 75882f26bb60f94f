"""Threads that compute token masks, in which a slow grammar delays no other request's masks.

Jobs start in quick threads. A job that takes long marks its request as slow, and its thread becomes a slow thread of
low priority, which a new quick thread replaces. Further jobs of slow requests run in slow threads, one at a time,
beginning with the request that has used the least processor time. No job is interrupted: the caller decides how long to
wait and how much time a request may use.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

QUICK_THREADS = 4
SLOW_THREADS = 1
MOST_THREADS = 32
SLOW_SECONDS = 0.002
"""Processor time after which a job that a step waits for makes its request slow."""
_PROBATION_PER_SECOND = 1000
_LONGEST_PROBATION = 128
_NICENESS = 10

T = TypeVar("T")
Clock = Callable[[], float]


class Account:
    """The processor time of one request, all choices together. The lock of `MaskThreads` guards it."""

    __slots__ = ("__weakref__", "probation", "seconds", "tokens")

    def __init__(self) -> None:
        self.seconds = 0.0
        """Processor time of finished jobs."""
        self.tokens = 0
        """Output tokens for which the jobs computed masks."""
        self.probation = 0
        """Number of jobs until the request counts as quick again."""

    @property
    def slow(self) -> bool:
        """Return whether its jobs run in slow threads, and no step waits for them."""
        return self.probation > 0


class Job(Generic[T]):
    """Work for an account, and its result."""

    __slots__ = ("_clock", "_error", "_result", "account", "done", "started", "thread", "work")

    def __init__(self, account: Account, work: Callable[[], T]) -> None:
        self.account = account
        self.work = work
        self.done = threading.Event()
        self.thread: _Thread | None = None
        """The thread that runs it now."""
        self.started = 0.0
        self._clock: Clock | None = None
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, and keep its error for `result`."""
        try:
            self._result = self.work()
        except BaseException as error:
            self._error = error

    def result(self) -> T:
        """Return the result of a finished job, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def start(self, thread: "_Thread") -> None:
        """Start to count processor time, in the thread that will run the job."""
        self.thread, self._clock = thread, thread.clock
        self.started = thread.clock()

    def seconds(self) -> float:
        """Return the processor time used so far by a running job; 0 for others."""
        return self._clock() - self.started if self._clock is not None and self.thread is not None else 0.0


class MaskThreads:
    """Threads in two lanes. All methods are thread-safe."""

    def __init__(self, quick: int = QUICK_THREADS, slow: int = SLOW_THREADS) -> None:
        self._slow_lane = slow
        self._changed = threading.Condition()
        self._quick: deque[Job[Any]] = deque()
        self._slow: list[Job[Any]] = []
        self._threads: set[_Thread] = set()
        self._closed = False
        with self._changed:
            for _ in range(quick):
                self._start(slow=False)

    @property
    def active(self) -> int:
        """The number of threads."""
        return len(self._threads)

    def submit(self, account: Account, work: Callable[[], T]) -> Job[T]:
        """Queue work. It runs even if its result is never awaited, unless `cancel` finds it still queued."""
        job = Job(account, work)
        with self._changed:
            self._queue(job)
            self._changed.notify_all()
        return job

    def cancel(self, job: Job[T]) -> None:
        """Abandon a job. If it runs, its thread is no longer counted and ends with it."""
        with self._changed:
            if job in self._quick:
                self._quick.remove(job)
            elif job in self._slow:
                self._slow.remove(job)
            elif job.thread is not None:
                self._demote(job.thread)
                job.thread.abandoned = True
                self._refill()

    def wait(self, jobs: Sequence[Job[Any]], seconds: float) -> None:
        """Wait up to `seconds` for jobs of quick requests. Requests whose jobs delay others become slow."""
        end = time.monotonic() + seconds
        for job in jobs:
            if not job.account.slow and not job.done.wait(max(0.0, end - time.monotonic())):
                break
        else:
            return
        with self._changed:
            for thread in [each for each in self._threads if not each.slow and each.job is not None]:
                if thread.job is not None and (used := thread.job.seconds()) >= SLOW_SECONDS:
                    self._mark_slow(thread.job.account, used)
                    self._demote(thread)
            self._refill()
            self._changed.notify_all()

    def await_any(self, jobs: Sequence[Job[Any]], seconds: float) -> None:
        """Wait up to `seconds` until one of the jobs is done."""
        with self._changed:
            self._changed.wait_for(lambda: any(job.done.is_set() for job in jobs), seconds)

    def spent(self, job: Job[T]) -> float:
        """Return the processor time of a job's account, including the running job."""
        with self._changed:
            return job.account.seconds + job.seconds()

    def close(self) -> None:
        """End all threads; busy ones end after their job."""
        with self._changed:
            self._closed = True
            self._quick.clear()
            self._slow.clear()
            idle = [each for each in self._threads if each.job is None]
            self._changed.notify_all()
        for each in idle:
            each.join()

    def _queue(self, job: Job[T]) -> None:
        lane = self._slow if job.account.slow else self._quick
        lane.append(job)
        if job.account.slow:
            self._refill()

    def _start(self, *, slow: bool) -> None:
        thread = _Thread(self._serve, slow=slow)
        self._threads.add(thread)
        thread.start()

    def _serve(self, thread: "_Thread") -> None:
        """Run jobs until the pool closes or has too many threads of this kind."""
        while True:
            with self._changed:
                while (job := self._next(thread)) is None:
                    if self._closed or self._surplus(thread):
                        self._threads.discard(thread)
                        return
                    self._changed.wait()
                thread.job = job
                job.start(thread)
            job.run()
            with self._changed:
                used = job.seconds()
                job.account.seconds += used
                if used >= SLOW_SECONDS and job.account.slow:
                    self._mark_slow(job.account, used)
                elif job.account.probation:
                    job.account.probation -= 1
                thread.job = job.thread = None
                job.done.set()
                self._changed.notify_all()

    def _next(self, thread: "_Thread") -> Job[Any] | None:
        if self._closed or thread.abandoned:
            return None
        if thread.slow:
            if self._surplus(thread) or not self._slow:
                return None
            job = min(self._slow, key=lambda each: each.account.seconds)
            self._slow.remove(job)
            return job
        while self._quick:
            job = self._quick.popleft()
            if not job.account.slow:
                return job
            self._slow.append(job)
            self._refill()
            self._changed.notify_all()
        return None

    def _surplus(self, thread: "_Thread") -> bool:
        return thread.abandoned or (
            thread.slow and sum(each.slow and not each.abandoned for each in self._threads) > self._slow_lane
        )

    def _demote(self, thread: "_Thread") -> None:
        """Turn a quick thread into a slow one, and start a replacement."""
        if thread.slow:
            return
        thread.lower_priority()
        if len(self._threads) < MOST_THREADS:
            self._start(slow=False)

    def _refill(self) -> None:
        """Start a slow thread if there are too few."""
        lane = sum(each.slow and not each.abandoned for each in self._threads)
        if lane < self._slow_lane and len(self._threads) < MOST_THREADS:
            self._start(slow=True)

    @staticmethod
    def _mark_slow(account: Account, seconds: float) -> None:
        """Mark a request as slow, for longer the more time a job took."""
        masks = min(_LONGEST_PROBATION, 1 + int(seconds * _PROBATION_PER_SECOND))
        account.probation = max(account.probation, masks)


class _Thread(threading.Thread):
    """A thread of one lane. It is a daemon, because its job may never end."""

    def __init__(self, serve: "Callable[[_Thread], None]", *, slow: bool) -> None:
        super().__init__(name="masks", daemon=True)
        self._serve = serve
        self.slow = slow
        self.abandoned = False
        """Its job was abandoned."""
        self.job: Job[Any] | None = None
        self.clock: Clock = time.monotonic

    def run(self) -> None:
        """Run the thread."""
        self.clock = _thread_clock()
        if self.slow:
            self.lower_priority()
        self._serve(self)

    def lower_priority(self) -> None:
        """Become a slow thread with low priority, which cannot be undone without privileges."""
        self.slow = True
        if sys.platform == "linux" and self.native_id is not None:
            os.setpriority(os.PRIO_PROCESS, self.native_id, _NICENESS)


def _thread_clock() -> Clock:
    """Return a clock of this thread's processor time that other threads can read; of real time if unavailable."""
    if sys.platform != "linux":
        return time.monotonic
    clock = time.pthread_getcpuclockid(threading.get_ident())
    return lambda: time.clock_gettime(clock)
