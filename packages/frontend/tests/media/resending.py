"""A request with media whose scheduler dies."""

import asyncio
from collections.abc import Awaitable

import httpx2

from packages.frontend.tests.polling import until
from tercet.frontend.testing import FakeEngine
from tercet.protocol.messages.messages import TokenizedGenerateReqInput


async def sent_twice(
    engine: FakeEngine, answer: Awaitable[httpx2.Response]
) -> tuple[TokenizedGenerateReqInput, TokenizedGenerateReqInput]:
    """Return the two messages of a request that goes on in another scheduler, with the same frames."""
    engine.auto = False
    asked = asyncio.ensure_future(answer)
    await until(lambda: len(engine.requests()) == 1)
    engine.scheduler_up("scheduler-1")
    engine.down("scheduler-0")
    await until(lambda: len(engine.requests()) == 2)
    for _ in range(5):
        engine.step()
    assert (await asked).status_code == 200
    first, again = engine.requests()[:2]
    assert again.attempt == 1
    assert engine.frames[0] == engine.frames[1]
    return first, again
