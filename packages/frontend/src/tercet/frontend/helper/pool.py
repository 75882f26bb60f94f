"""Pool of helpers, which callers use in turn."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from tercet.frontend.errors import ServerError, UnavailableError
from tercet.frontend.helper.process import HelperDiedError
from tercet.frontend.http.auth import current_caller

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2
"""Attempts at work whose helper died, which may have died before it received the work."""
T = TypeVar("T")


class Helper(Protocol):
    """Owner of one helper process."""

    @property
    def pid(self) -> int | None: ...
    async def stop(self) -> None: ...


HelperT = TypeVar("HelperT", bound=Helper)


class HelperPool(Generic[HelperT]):
    """Pool of helpers. Work beyond `max_waiting` is refused.

    One API key uses at most all helpers but one, and half of the queue. `work` names the work in messages, as a plural.
    """

    def __init__(self, helpers: Sequence[HelperT], max_waiting: int, work: str) -> None:
        self._all = list(helpers)
        self._idle = list(helpers)
        self._work = work
        self._slots = asyncio.Semaphore(len(helpers))
        self._slots_by_key: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._waiting_by_key: Counter[str] = Counter()
        self._max = len(helpers) + max_waiting

    @property
    def pids(self) -> list[int]:
        return [helper.pid for helper in self._all if helper.pid is not None]

    async def close(self) -> None:
        await asyncio.gather(*(helper.stop() for helper in self._all))

    async def run(
        self, work: Callable[[HelperT], Awaitable[T]], prefers: Callable[[HelperT], bool] = lambda _: False
    ) -> T:
        """Return the result of work with a helper, one that it `prefers` if possible.

        Raises HelperDiedError if the input is at fault, UnavailableError if many wait, and ServerError.
        """
        async with self._turn(prefers) as helper:
            for _ in range(_MAX_ATTEMPTS):
                try:
                    return await work(helper)
                except HelperDiedError as error:
                    logger.warning("%s reason=%s", error, error.why or "not its input, the work is repeated")
                    if error.why is not None:
                        raise
                except TimeoutError:  # for want of a processor: its processor time was not used up
                    logger.warning("%s: helper timed out without processor time: lower the load", self._work)
                    raise self._unavailable(f"{self._work.capitalize()} cannot be processed now.") from None
                except OSError:
                    logger.exception("%s: helper could not be started", self._work)
            raise ServerError(f"{self._work.capitalize()} cannot be processed now.")

    @asynccontextmanager
    async def _turn(self, prefers: Callable[[HelperT], bool]) -> AsyncIterator[HelperT]:
        owner = current_caller().owner
        if self._waiting_by_key.total() >= self._max or (owner and self._waiting_by_key[owner] >= self._max // 2):
            raise self._unavailable(f"Too many {self._work} wait.")
        self._waiting_by_key[owner] += 1
        try:
            async with self._key_slots(owner), self._slots:
                helper = next(filter(prefers, self._idle), self._idle[-1])
                self._idle.remove(helper)
                try:
                    yield helper
                finally:
                    self._idle.append(helper)
        finally:
            self._waiting_by_key -= Counter([owner])

    def _key_slots(self, owner: str) -> asyncio.Semaphore:
        """Return a key's semaphore. It admits less work than there are helpers, so other keys find one free."""
        slots = self._slots_by_key.get(owner)
        if slots is None:
            helpers = len(self._all)
            slots = self._slots_by_key[owner] = asyncio.Semaphore(max(1, helpers - 1) if owner else helpers)
        return slots

    @staticmethod
    def _unavailable(message: str) -> UnavailableError:
        return UnavailableError(message, code="overloaded", retry_after=1)
