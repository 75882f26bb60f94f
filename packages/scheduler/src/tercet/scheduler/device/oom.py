"""Where there is no memory: what says so, what torch keeps is given back, and rows are computed in halves."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, TypeVar

import torch

from tercet.scheduler.config import InsufficientMemoryError

logger = logging.getLogger(__name__)

_SAID = (
    "DefaultCPUAllocator",  # torch, of the host's memory
    "std::bad_alloc",
    "CUDA error: out of memory",  # the driver, of what is not torch's allocator's: graphs, modules
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)
"""Words by which a RuntimeError alone tells that there was no memory."""

_FORGOTTEN_AFTER = 256
"""Computations that found memory: then one as large as what failed may find it, too."""

Given = TypeVar("Given")


def lacks_memory(error: BaseException) -> bool:
    """Whether it was memory that a computation lacked, of the host or of an accelerator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)


@contextmanager
def require_memory(what: str) -> Iterator[None]:
    """A block without which nothing is served. Raises InsufficientMemoryError where there is no memory for `what`."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        said = str(error).strip().partition("\n")[0]
        said = said.partition(" Of the allocated memory")[0]  # then torch explains its own
        raise InsufficientMemoryError(f"no memory for {what}: {said}") from error


class SuppressOom:
    """A block that may find no memory: if so, what stands behind it goes on. Other errors pass.

    What the block computed is free there: no error holds it any longer.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or not lacks_memory(error):
            return False
        logger.warning("no memory: %s", str(error))
        return True


def release_cached() -> None:
    """Give memory that torch keeps back to the device, where it may become one piece."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def again(run: Callable[[], Given], release: Callable[[], None]) -> Given:
    """The result of `run`; if memory is short, of a second call after `release`. Raises what `run` raises then."""
    with SuppressOom():
        return run()
    release()
    return run()


class OomPolicy(Protocol):
    """Computes rows, all at once or in parts."""

    def __call__(
        self, run: Callable[[slice], Given], rows: slice, size: Callable[[slice], int] = ..., /
    ) -> list[Given]:
        """What `run` gives of the rows, in their order. `size` says how much some of them are."""
        ...


class NoSplit:
    """The `OomPolicy` of a process among several: never tries again, for the others would wait for its second try."""

    def __call__(
        self,
        run: Callable[[slice], Given],
        rows: slice,
        size: Callable[[slice], int] = lambda _: 0,  # noqa: ARG002
    ) -> list[Given]:
        """What `run` gives of all rows. Raises what it raises."""
        return [run(rows)]


class SplitOnOom:
    """Computes rows at once or, where there is no memory, in halves of halves, down to one row.

    What was too large even when memory was given back is halved at once from then on, until other computations have
    found memory for a while. `unit` names in the log what sizes are counted in.
    """

    def __init__(self, unit: str, release: Callable[[], None] = release_cached) -> None:
        self._unit = unit
        self._release = release
        self._most: int | None = None
        self._found = 0  # computations that found memory since one did not

    def __call__(
        self,
        run: Callable[[slice], Given],
        rows: slice,
        size: Callable[[slice], int] = lambda rows: rows.stop - rows.start,
    ) -> list[Given]:
        """What `run` gives of the rows, in their order. `size` says how much some of them are, in units.

        `run` may begin anew on rows that it did not finish. Raises what it raises where there is no memory for one row.
        """
        count = rows.stop - rows.start
        if count <= 1:
            return [self._noted(again(lambda: run(rows), self._release))]
        if self._most is None or size(rows) <= self._most:
            for _ in range(2):
                with SuppressOom():
                    return [self._noted(run(rows))]
                self._release()
            self._limit(size(rows))
        middle = rows.start + count // 2
        return [*self(run, slice(rows.start, middle), size), *self(run, slice(middle, rows.stop), size)]

    def _noted(self, given: Given) -> Given:
        self._found += 1
        if self._found >= _FORGOTTEN_AFTER:
            self._most = None
        return given

    def _limit(self, size: int) -> None:
        self._most, self._found = size // 2, 0
        logger.warning("no memory for %d %s at once: for a while at most %d", size, self._unit, self._most)
