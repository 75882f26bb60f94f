"""Slow jobs of one request hold up no job of another."""

import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from threading import Event

import pytest

from tercet.scheduler.executor.sampling.mask_threads import MOST_THREADS, SLOW_SECONDS, Account, Job, MaskThreads

LONG = 60.0


@pytest.fixture
def threads() -> Iterator[MaskThreads]:
    pool = MaskThreads(quick=2, slow=1)
    yield pool
    pool.close()


class Slow:
    """Work that uses processor time until it is let go."""

    def __init__(self) -> None:
        self.go = Event()
        self.started = Event()

    def __call__(self) -> str:
        end = time.thread_time() + 2 * SLOW_SECONDS
        while time.thread_time() < end:
            pass
        self.started.set()
        assert self.go.wait(LONG)
        return "late"


def slow_jobs(threads: MaskThreads, account: Account, count: int) -> tuple[list[Slow], list[Job[str]]]:
    works = [Slow() for _ in range(count)]
    return works, [threads.submit(account, work) for work in works]


def test_a_result_and_an_error_are_given(threads: MaskThreads) -> None:
    def fail() -> None:
        raise LookupError("no")

    good, bad = threads.submit(Account(), lambda: 7), threads.submit(Account(), fail)
    threads.wait([good, bad], LONG)
    assert good.result() == 7
    with pytest.raises(LookupError):
        bad.result()


def test_slow_jobs_leave_the_quick_threads_to_others(threads: MaskThreads) -> None:
    slow, quick = Account(), Account()
    works, jobs = slow_jobs(threads, slow, 8)
    for work in works[:2]:
        assert work.started.wait(LONG)
    behind = threads.submit(quick, lambda: "quick")
    threads.wait([*jobs, behind], 0.01)
    assert slow.slow
    assert behind.done.wait(LONG), "the quick threads were replaced"
    assert not quick.slow
    assert not any(job.done.is_set() for job in jobs)
    started = sum(work.started.is_set() for work in works)
    assert started <= 3, "of a slow request one job runs at a time, beside those that had begun"
    for work in works:
        work.go.set()
    assert all(job.done.wait(LONG) for job in jobs)
    assert slow.seconds >= 8 * SLOW_SECONDS


def test_nobody_waits_for_a_request_that_is_slow(threads: MaskThreads) -> None:
    account = Account()
    account.probation = 5
    (work,), jobs = slow_jobs(threads, account, 1)
    threads.wait(jobs, LONG)
    assert not jobs[0].done.is_set()
    work.go.set()


def test_the_request_that_spent_least_goes_first(threads: MaskThreads) -> None:
    rich, poor = Account(), Account()
    order: list[Account] = []
    for account, seconds in ((rich, 9.0), (poor, 1.0)):
        account.probation, account.seconds = 100, seconds
    (work,), _ = slow_jobs(threads, rich, 1)
    assert work.started.wait(LONG)
    jobs = [threads.submit(each, partial(order.append, each)) for each in (rich, rich, poor)]
    work.go.set()
    assert all(job.done.wait(LONG) for job in jobs)
    assert order == [poor, rich, rich]


def test_a_slow_request_that_is_quick_again_is_quick(threads: MaskThreads) -> None:
    account = Account()
    account.probation = 3
    for _ in range(3):
        assert account.slow
        assert threads.submit(account, int).done.wait(LONG)
        with threads._changed:
            pass  # the books are kept before the job is done
    assert not account.slow


def test_time_is_counted_while_a_job_runs(threads: MaskThreads) -> None:
    (work,), (job,) = slow_jobs(threads, Account(), 1)
    assert work.started.wait(LONG)
    assert threads.spent(job) >= 2 * SLOW_SECONDS
    work.go.set()
    assert job.done.wait(LONG)
    assert job.seconds() == 0
    assert threads.spent(job) == job.account.seconds >= 2 * SLOW_SECONDS


def test_a_job_that_is_given_up_holds_up_nothing(threads: MaskThreads) -> None:
    """Not even the slow jobs of others, though it never ends."""
    account, other = Account(), Account()
    account.probation = other.probation = 100
    works, (runs, waits) = slow_jobs(threads, account, 2)
    assert works[0].started.wait(LONG)
    threads.cancel(waits)  # first: the thread that replaces that of `runs` would take it
    threads.cancel(runs)
    assert threads.submit(other, lambda: "on").done.wait(LONG)
    assert not works[1].started.is_set()
    works[0].go.set()


def test_threads_are_bounded(threads: MaskThreads) -> None:
    works: list[Slow] = []
    for _ in range(MOST_THREADS + 8):
        new, jobs = slow_jobs(threads, Account(), 1)
        if threads.active >= MOST_THREADS:
            works += new
            break
        assert new[0].started.wait(LONG)
        threads.wait(jobs, 0.0)
        works += new
    assert threads.active == MOST_THREADS
    for work in works:
        work.go.set()


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_slow_threads_give_way(threads: MaskThreads) -> None:
    import os

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    slow = Account()
    slow.probation = 9
    (work,), jobs = slow_jobs(threads, Account(), 1)
    assert work.started.wait(LONG)
    threads.wait(jobs, 0.0)
    work.go.set()
    quick_job, slow_job = threads.submit(Account(), priority), threads.submit(slow, priority)
    assert quick_job.done.wait(LONG)
    assert slow_job.done.wait(LONG)
    assert slow_job.result() > quick_job.result()
