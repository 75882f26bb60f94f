"""Rendering and tokenizing: in threads of their own, and with an end to the wait for them."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Generic, TypeVar

from tercet.frontend.errors import BadRequestError, UnavailableError

SECONDS = 30.0
"""For a text's turn to come, and again for the work on it."""
_T = TypeVar("_T")


class _Job(Generic[_T]):
    """One piece of work, and when a thread took it up."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self.began: float | None = None

    def __call__(self) -> _T:
        self.began = time.monotonic()
        return self._work()


class TextWork:
    """Work on texts, off the event loop. The pool's threads bound how much of the machine it takes.

    A thread cannot be stopped: what is too slow is left to run, and nobody waits for it any more. So how much text
    gets here is bounded as well (`ServedModel.prompt_ids`). Without a pool it is done in the loop's own threads.
    """

    def __init__(self, pool: Executor | None = None, seconds: float = SECONDS) -> None:
        self._pool = pool
        self._seconds = seconds

    async def run(self, work: Callable[[], _T]) -> _T:
        """The result of `work`. Raises UnavailableError if its turn does not come, BadRequestError if it is slow."""
        job = _Job(work)
        result = asyncio.get_running_loop().run_in_executor(self._pool, job)
        try:
            await asyncio.wait({result}, timeout=self._seconds)
            if not result.done() and job.began is not None:  # it may have begun late
                await asyncio.wait({result}, timeout=job.began + self._seconds - time.monotonic())
            if result.done():
                return result.result()
        finally:
            result.cancel()  # one that waits for its turn never begins
        if job.began is None:
            raise UnavailableError("Too many texts wait to be tokenized.", retry_after=1)
        raise BadRequestError(f"This text could not be tokenized within {self._seconds:g} seconds.")
