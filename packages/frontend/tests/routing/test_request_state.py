"""SingleWaiterEvent: no event is lost or delivered twice."""

import asyncio
from collections.abc import Awaitable, Callable

from tercet.frontend.routing.request_state import SingleWaiterEvent


def with_waiter(play: Callable[[SingleWaiterEvent, "asyncio.Task[None]"], Awaitable[None]]) -> None:
    async def run() -> None:
        wake = SingleWaiterEvent()
        waiter = asyncio.create_task(wake.wait())
        await asyncio.sleep(0)
        await play(wake, waiter)
        waiter.cancel()

    asyncio.run(run())


async def turns() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_waits_for_news() -> None:
    async def play(wake: SingleWaiterEvent, waiter: "asyncio.Task[None]") -> None:
        await turns()
        assert not waiter.done()
        wake.set()
        wake.set()
        await turns()
        assert waiter.done()

    with_waiter(play)


def test_news_from_before_is_told_at_once_and_once() -> None:
    async def play(wake: SingleWaiterEvent, waiter: "asyncio.Task[None]") -> None:
        wake.set()
        await waiter
        wake.set()
        await asyncio.wait_for(wake.wait(), 1)
        again = asyncio.create_task(wake.wait())
        await turns()
        assert not again.done()
        again.cancel()

    with_waiter(play)


def test_news_of_a_waiter_that_gave_up_is_there_for_the_next() -> None:
    async def play(wake: SingleWaiterEvent, waiter: "asyncio.Task[None]") -> None:
        wake.set()
        waiter.cancel()
        await turns()
        assert waiter.cancelled()
        wake.set()  # harmless without a waiter
        await asyncio.wait_for(wake.wait(), 1)

    with_waiter(play)
