"""Out-of-memory handling: detection, release of torch's cached memory, and computation in halves."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from tercet.scheduler.config import InsufficientMemoryError

logger = logging.getLogger(__name__)

_OOM_MESSAGES = (
    "DefaultCPUAllocator",  # torch's host allocator
    "std::bad_alloc",
    "CUDA error: out of memory",  # the driver, for memory outside torch's allocator: graphs, modules
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Parts of RuntimeError messages that mean lack of memory."""

RETRY_AFTER = 256
"""Successful computations after which a size that failed is tried again."""

Given = TypeVar("Given")


def lacks_memory(error: BaseException) -> bool:
    """Return whether a computation failed for lack of host or accelerator memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OOM_MESSAGES)


@contextmanager
def require_memory(what: str) -> Iterator[None]:
    """Enter a block that the server cannot do without. Raise InsufficientMemoryError if memory for `what` is
    lacking.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        said = str(error).strip().partition("\n")[0]
        said = said.partition(" Of the allocated memory")[0]  # torch's statistics follow
        raise InsufficientMemoryError(f"no memory for {what}: {said}") from error


class SuppressOom:
    """A context manager that suppresses out-of-memory errors and lets others pass.

    After the block, no error holds on to its tensors.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not lacks_memory(error):
            return False
        logger.warning("out of memory: %s", str(error))
        return True


def release_cached() -> None:
    """Return cached memory to the device, where it may be defragmented."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def again(run: Callable[[], Given], release: Callable[[], None]) -> Given:
    """Return the result of `run`; if memory is short, of a second call after `release`. Raise its error then."""
    with SuppressOom():
        return run()
    release()
    return run()


class OomPolicy(Protocol):
    """The interface of a policy that computes rows at once or in parts."""

    def __call__(
        self, run: Callable[[slice], Given], rows: slice, size: Callable[[slice], int] = ..., /
    ) -> list[Given]:
        """Return the results of `run` for the rows, in their order. `size` gives the size of a range of rows."""
        ...


class NoSplit:
    """The `OomPolicy` of one rank of several: it never retries, because other ranks would wait in their collectives."""

    def __call__(
        self,
        run: Callable[[slice], Given],
        rows: slice,
        size: Callable[[slice], int] = lambda _: 0,  # noqa: ARG002
    ) -> list[Given]:
        """Return the result of `run` for all rows. Raise its error."""
        return [run(rows)]


class SplitOnOom:
    """An `OomPolicy` that computes rows at once or, if memory is short, in halves of halves, down to one row.

    A size that does not fit even after a release of cached memory is split at once from then on, until enough other
    computations have succeeded. `unit` names the unit of sizes in the log.
    """

    def __init__(self, unit: str, release: Callable[[], None] = release_cached, retry_after: int = RETRY_AFTER) -> None:
        self._retry_after = retry_after
        self._unit = unit
        self._release = release
        self._max_size: int | None = None
        self._successes = 0  # successful computations since the last failure

    def __call__(
        self,
        run: Callable[[slice], Given],
        rows: slice,
        size: Callable[[slice], int] = lambda rows: rows.stop - rows.start,
    ) -> list[Given]:
        """Return the results of `run` for the rows, in their order. `size` gives the size of a range in units.

        `run` may be called again for rows that it did not finish. Raise its error if one row does not fit.
        """
        count = rows.stop - rows.start
        if count <= 1:
            return [self._count_success(again(lambda: run(rows), self._release))]
        if self._max_size is None or size(rows) <= self._max_size:
            for _ in range(2):
                with SuppressOom():
                    return [self._count_success(run(rows))]
                self._release()
            self._limit(size(rows))
        middle = rows.start + count // 2
        return [*self(run, slice(rows.start, middle), size), *self(run, slice(middle, rows.stop), size)]

    def _count_success(self, given: Given) -> Given:
        self._successes += 1
        if self._successes >= self._retry_after:
            self._max_size = None
        return given

    def _limit(self, size: int) -> None:
        self._max_size, self._successes = size // 2, 0
        logger.warning(
            "out of memory for %d %s at once, splitting into at most %d for a while", size, self._unit, self._max_size
        )
