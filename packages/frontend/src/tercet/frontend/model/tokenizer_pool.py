"""Thread pool for rendering and tokenization, with fair shares per API key and timeouts."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.http.auth import current_caller
from tercet.frontend.model.fair_queue import FairQueue, Flow

TIMEOUT = 30.0
"""Maximum wait in the queue, and maximum duration of the work."""
LONG = 65_536
"""Minimum characters of a long text. Long texts leave at least one thread to short ones, if there are two."""
MAX_QUEUED = 4096
"""Maximum number of queued jobs."""
MAX_QUEUED_CHARACTERS = 1 << 28
"""Maximum total characters of queued jobs."""
_MAX_QUEUED_PER_REQUEST = 4
"""Maximum number of queued jobs of one request."""
_MIN_COST = 1024
"""Minimum cost of a job in characters, for waking a thread."""
_VALUES_COUNTED = 1024
_T = TypeVar("_T")


class Piece(NamedTuple, Generic[_T]):
    """Function to run in a thread, and the characters of text that it processes."""

    work: Callable[[], _T]
    size: int = 0


class _Job(Generic[_T]):
    """Queued or running job; `began` is set when a thread starts it."""

    def __init__(self, piece: Piece[_T], owner: str) -> None:
        self.piece = piece
        self.flow = Flow(owner, piece.size >= LONG)
        self.result: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.queued = True
        self.began: float | None = None

    def __call__(self) -> _T:
        self.began = time.monotonic()
        return self.piece.work()


class TokenizerPool:
    """Fair scheduler of text jobs on `threads` threads of a pool.

    `FairQueue` selects the next job by the cost served to each API key. One key gets at most all threads but one, and
    half of the queue. Threads cannot be interrupted: a job that timed out still counts as running until its thread is
    free. Without a pool, the event loop's default executor is used.
    """

    def __init__(
        self,
        pool: Executor | None = None,
        seconds: float = TIMEOUT,
        *,
        threads: int = 1,
        most: int = MAX_QUEUED_CHARACTERS,
    ) -> None:
        self._pool = pool
        self._seconds = seconds
        self._threads = threads
        self._max_characters = most
        self._queue: FairQueue[_Job[Any]] = FairQueue()
        self._running: Counter[Flow] = Counter()
        """Jobs that run in a thread."""
        self._pieces: Counter[str] = Counter()
        """Queued jobs by owner."""
        self._characters: Counter[str] = Counter()
        """Characters of the queued jobs by owner."""

    async def run(self, piece: Piece[_T]) -> _T:
        """Run a job and return its result.

        Raises UnavailableError if the queue is full or the job is not started in time, and BadRequestError if it takes
        too long.
        """
        job = self._enqueue(piece)
        try:
            self._fill_threads()
            await asyncio.wait({job.result}, timeout=self._seconds)
            if not job.result.done() and job.began is not None:  # it may have started late
                await asyncio.wait({job.result}, timeout=job.began + self._seconds - time.monotonic())
            if job.result.done():
                return job.result.result()
        finally:
            job.result.cancel()
            if job.queued:
                self._queue.remove(job.flow, job)
                self._dequeue(job)
        if job.began is None:
            raise UnavailableError("Too many texts wait to be tokenized.", retry_after=1)
        raise BadRequestError(f"This text could not be tokenized within {self._seconds:g} seconds.")

    async def run_all(self, pieces: Sequence[Piece[_T]]) -> list[_T]:
        """Run the jobs of one request, a few of which are queued at a time, and return their results.

        Raises the first error, after which no further job is started.
        """
        if len(pieces) == 1:
            return [await self.run(pieces[0])]
        results: dict[int, _T] = {}
        numbered = iter(enumerate(pieces))
        tasks = [
            asyncio.create_task(self._run_remaining(numbered, results))
            for _ in range(min(_MAX_QUEUED_PER_REQUEST, len(pieces)))
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return [results[place] for place in range(len(pieces))]

    async def _run_remaining(self, pieces: Iterator[tuple[int, Piece[_T]]], results: dict[int, _T]) -> None:
        for place, piece in pieces:
            results[place] = await self.run(piece)

    def _enqueue(self, piece: Piece[_T]) -> _Job[_T]:
        """Queue a job. Raises UnavailableError if the queue or the owner's share of it is full."""
        job = _Job(piece, current_caller().owner)
        owner = job.flow.owner
        share = 2 if owner else 1
        if (pieces := self._pieces[owner]) and (
            self._pieces.total() >= MAX_QUEUED
            or pieces >= MAX_QUEUED // share
            or self._characters.total() + piece.size > self._max_characters
            or self._characters[owner] + piece.size > self._max_characters // share
        ):
            raise UnavailableError("Too many texts wait to be tokenized.", code="overloaded", retry_after=1)
        self._pieces[owner] += 1
        self._characters[owner] += piece.size
        self._queue.add(job.flow, job, max(piece.size, _MIN_COST))
        return job

    def _dequeue(self, job: _Job[Any]) -> None:
        owner = job.flow.owner
        job.queued = False
        self._pieces[owner] -= 1
        self._characters[owner] -= job.piece.size
        if not self._pieces[owner]:
            del self._pieces[owner], self._characters[owner]

    def _fill_threads(self) -> None:
        """Start jobs while threads are free."""
        while self._running.total() < self._threads and (job := self._queue.pop(self._may_run)) is not None:
            self._dequeue(job)
            self._running[job.flow] += 1
            work = asyncio.get_running_loop().run_in_executor(self._pool, job)
            work.add_done_callback(partial(self._on_done, job))

    def _may_run(self, flow: Flow) -> bool:
        """Return whether threads remain for other keys and for short texts if this flow gets one."""
        most = max(1, self._threads - 1)
        long = sum(count for each, count in self._running.items() if each.long)
        own = self._running[Flow(flow.owner)] + self._running[Flow(flow.owner, long=True)]
        return not (flow.long and long >= most) and not (flow.owner and own >= most)

    def _on_done(self, job: _Job[Any], work: asyncio.Future[Any]) -> None:
        self._running -= Counter([job.flow])
        if work.cancelled():  # the pool was closed
            job.result.cancel()
            return
        error = work.exception()
        if not job.result.done():
            if error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(work.result())
        self._fill_threads()


def characters_in(value: object) -> int:
    """Return the total characters of the texts in a JSON value; at least LONG for a value with very many parts."""
    count, left = 0, [value]
    for _ in range(_VALUES_COUNTED):
        if not left:
            return count
        match left.pop():
            case str() as text:
                count += len(text)
            case Mapping() as parts:
                left += parts.values()
            case list() | tuple() as parts:
                left += parts
            case _:
                count += 1
    return max(count, LONG)
