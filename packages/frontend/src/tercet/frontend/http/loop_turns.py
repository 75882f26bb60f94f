"""Turns of the event loop: work that is too long to be done beside that of other requests, in pieces and with pauses.

Everything that a frontend streams passes one event loop. A thread would not help: parsing and writing JSON holds the
interpreter's lock. So a long piece of work waits for its turn. Turns are given one at a time, in rotation between API
keys, and after each the loop is left to others for at least as long as the turn took.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from tercet.frontend.round_robin import RoundRobinQueue

_Result = TypeVar("_Result")

Steps = Generator[None, None, _Result]
"""Work in steps of about a millisecond at the most; it returns its result."""

SLICE = 0.001
"""Seconds of steps that are done in one turn."""
_SHORT = 0.005
"""Seconds: a turn of more than this is followed by a long rest."""
_REST = 1.0
"""Seconds of rest for each second of a short turn."""
_LONG_REST = 20.0
"""The same after a long one: few of another request's tokens may wait for it, not one in a hundred."""


class LoopTurns:
    """The turns of one event loop. `clock` gives the seconds that its thread has computed for."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._taken = False
        self._waiting = RoundRobinQueue()

    @property
    def waiting(self) -> int:
        """The number of turns that are waited for."""
        return len(self._waiting)

    async def turn(self, owner: str) -> None:
        """Wait for a turn. It lasts until the calling task next waits for anything."""
        if self._taken:
            await self._wait(owner)
        self._taken = True
        asyncio.get_running_loop().call_soon(self._end, self._clock())

    async def run(self, owner: str, steps: Steps[_Result]) -> _Result:
        """Return the result of `steps`. Those that fit into one slice are done at once, others in turns."""
        try:
            while True:
                end = self._clock() + SLICE
                while self._clock() < end:
                    next(steps)
                await self.turn(owner)
        except StopIteration as stop:
            result: _Result = stop.value
            return result
        finally:
            steps.close()

    async def _wait(self, owner: str) -> None:
        chance = self._waiting.join(owner)
        try:
            await chance
        except asyncio.CancelledError:
            if not chance.cancelled():
                self._next()  # the turn was given, and nothing is done with it
            raise

    def _end(self, began: float) -> None:
        took = self._clock() - began
        rest = took * (_REST if took < _SHORT else _LONG_REST)
        asyncio.get_running_loop().call_later(rest, self._next)

    def _next(self) -> None:
        """Give the next turn, if one is waited for."""
        self._taken = self._waiting.next()


def result_of(steps: Steps[_Result]) -> _Result:
    """Return the result of `steps`, done at once."""
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        result: _Result = stop.value
        return result


def no_steps(_: object) -> Steps[None]:
    """Return work that is done already."""
    return
    yield
