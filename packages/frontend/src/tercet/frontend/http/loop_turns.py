"""Turns of the event loop: long work runs in short pieces, with pauses for other requests.

Everything that a frontend streams passes through one event loop. A thread would not help, because parsing and writing
JSON holds the GIL. Long work therefore waits for its turn. Turns are given one at a time, in rotation between API keys.
After each turn the loop is free for others for at least as long as the turn took.
"""

import asyncio
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from starlette.requests import Request

from tercet.frontend.round_robin import RoundRobinQueue

_Result = TypeVar("_Result")

Steps = Generator[None, None, _Result]
"""Work in steps of at most about a millisecond; its return value is the result."""

SLICE_SECONDS = 0.001
"""Seconds of work in one turn."""
_SHORT_TURN = 0.005
"""Seconds. A longer turn is followed by a long rest."""
_REST_RATIO = 1.0
"""Seconds of rest for each second of a short turn."""
_LONG_REST_RATIO = 20.0
"""Seconds of rest for each second of a long turn. Work then delays few tokens of other requests, less than one in a
hundred."""

MOST_PLACES = 4
"""Pieces of work in one iteration of the event loop. Each takes about a millisecond at most."""


class LoopTurns:
    """The turns of one event loop. `clock` returns the CPU seconds of its thread."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._busy = False
        self._waiting = RoundRobinQueue()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def waiting(self) -> int:
        """Return the number of tasks that wait for a turn."""
        return len(self._waiting)

    async def turn(self, owner: str) -> None:
        """Wait for a turn. The turn lasts until the calling task awaits again."""
        if self._busy:
            await self._wait(owner)
        self._busy = True
        asyncio.get_running_loop().call_soon(self._end, self._clock())

    async def run(self, owner: str, steps: Steps[_Result]) -> _Result:
        """Return the result of `steps`. Work that fits into one slice runs at once, longer work in turns."""
        try:
            while True:
                end = self._clock() + SLICE_SECONDS
                while self._clock() < end:
                    next(steps)
                await self.turn(owner)
        except StopIteration as stop:
            result: _Result = stop.value
            return result
        finally:
            steps.close()

    def start(self, owner: str, steps: Steps[None]) -> None:
        """Run `steps` in turns, in a task if they do not fit into one slice."""
        end = self._clock() + SLICE_SECONDS
        for _ in steps:
            if self._clock() >= end:
                task = asyncio.create_task(self.run(owner, steps))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                return

    async def close(self) -> None:
        """Wait for the tasks of `start`."""
        await asyncio.gather(*self._tasks)

    async def _wait(self, owner: str) -> None:
        turn = self._waiting.join(owner)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._give_next()  # the turn was given to a cancelled task: pass it on
            raise

    def _end(self, started: float) -> None:
        elapsed = self._clock() - started
        rest = elapsed * (_REST_RATIO if elapsed < _SHORT_TURN else _LONG_REST_RATIO)
        asyncio.get_running_loop().call_later(rest, self._give_next)

    def _give_next(self) -> None:
        """Give the next turn to a waiting task, if there is one."""
        self._busy = self._waiting.next()


class LoopPlaces:
    """Places for small pieces of work of one kind in an iteration of the event loop; API keys rotate.

    An iteration handles everything that has arrived. Without places, a client that sends a thousand small requests at a
    time would make one long iteration, for which the streams of others wait.
    """

    def __init__(self) -> None:
        self._left = MOST_PLACES
        self._waiting = RoundRobinQueue()

    async def wait(self, owner: str) -> None:
        """Wait until the loop has a place."""
        if self._left == MOST_PLACES:
            asyncio.get_running_loop().call_soon(self._renew)  # runs in the next iteration
        if not self._left or len(self._waiting):
            await self._waiting.join(owner)
        else:
            self._left -= 1

    def _renew(self) -> None:
        self._left = MOST_PLACES
        while self._left and self._waiting.next():
            self._left -= 1
        if self._left < MOST_PLACES:
            asyncio.get_running_loop().call_soon(self._renew)


def turns_of(request: Request) -> LoopTurns:
    """Return the turns of the app that serves a request."""
    turns = request.app.state.loop_turns
    assert isinstance(turns, LoopTurns)
    return turns


def result_of(steps: Steps[_Result]) -> _Result:
    """Return the result of `steps`, run at once."""
    try:
        while True:
            next(steps)
    except StopIteration as stop:
        result: _Result = stop.value
        return result


def no_steps(_: object) -> Steps[None]:
    """Return work without steps."""
    return
    yield
