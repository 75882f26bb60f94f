"""Pool of helpers, which callers use in turn."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from tercet.frontend.errors import ServerError
from tercet.frontend.helper.process import HelperDiedError
from tercet.frontend.helper.slots import KeySlots, overloaded

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
    """Pool of helpers, which API keys share by `KeySlots`. `work` names the work in messages, as a plural."""

    def __init__(self, helpers: Sequence[HelperT], max_waiting: int, work: str) -> None:
        self._all = list(helpers)
        self._idle = list(helpers)
        self._work = work
        self._slots = KeySlots(len(helpers), max_waiting, work)

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
                    raise overloaded(f"{self._work.capitalize()} cannot be processed now.") from None
                except OSError:
                    logger.exception("%s: helper could not be started", self._work)
            raise ServerError(f"{self._work.capitalize()} cannot be processed now.")

    @asynccontextmanager
    async def _turn(self, prefers: Callable[[HelperT], bool]) -> AsyncIterator[HelperT]:
        async with self._slots.slot():
            helper = next(filter(prefers, self._idle), self._idle[-1])
            self._idle.remove(helper)
            try:
                yield helper
            finally:
                self._idle.append(helper)
