"""A request with many prompts starts in turns of the event loop, between which other requests start."""

import asyncio
from collections.abc import Callable
from itertools import count

import httpx2

from tercet.frontend.http import loop_turns
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.messages import AbortReq, TokenizedGenerateReqInput

EngineOf = Callable[..., FakeEngine]
HttpOf = Callable[[Served], httpx2.AsyncClient]

PROMPTS = 64


def shorten_turns(served: Served) -> None:
    """Let every step of work wait for a turn."""
    ticks = count()
    served.manager.requests.turns._clock = lambda: 0.6 * loop_turns.SLICE_SECONDS * next(ticks)


def sent(engine: FakeEngine) -> list[str]:
    """Return the prompts that were dispatched, as their number of choices says which request they are of."""
    return [
        "many" if message.sampling.n == 1 else "other"
        for _, message in engine.sent
        if isinstance(message, TokenizedGenerateReqInput)
    ]


def ask_many(http: httpx2.AsyncClient) -> "asyncio.Task[httpx2.Response]":
    """Send a request with many prompts."""
    body = {"model": "tiny", "prompt": ["hello"] * PROMPTS, "max_tokens": 2}
    return asyncio.create_task(http.post("/v1/completions", json=body))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0)


async def test_another_request_starts_between_the_prompts_of_one(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        shorten_turns(served)
        http = http_of(served)
        body = {"model": "tiny", "prompt": ["hello"] * PROMPTS, "max_tokens": 2}
        many = asyncio.create_task(http.post("/v1/completions", json=body))
        await until(lambda: "many" in sent(engine))
        other = asyncio.create_task(http.post("/v1/completions", json={**body, "prompt": "hello", "n": 2}))
        await until(lambda: len(sent(engine)) == PROMPTS + 1)
        assert "many" in sent(engine)[sent(engine).index("other") :]
        while not (many.done() and other.done()):
            engine.step()
            await asyncio.sleep(0)
        assert len((await many).json()["choices"]) == PROMPTS
        assert len((await other).json()["choices"]) == 2


async def test_prompts_that_started_are_aborted_if_the_client_leaves(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        shorten_turns(served)
        many = ask_many(http_of(served))
        await until(lambda: len(sent(engine)) > 2)
        many.cancel()
        await until(lambda: not served.manager.requests.states)
        started = {message.rid for _, message in engine.sent if isinstance(message, TokenizedGenerateReqInput)}
        await until(lambda: {message.rid for _, message in engine.sent if isinstance(message, AbortReq)} == started)
        assert len(sent(engine)) == len(started) < PROMPTS


async def test_prompts_are_aborted_in_turns(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        many = ask_many(http_of(served))
        await until(lambda: len(sent(engine)) == PROMPTS)
        shorten_turns(served)
        many.cancel()
        aborts: list[int] = []
        while not aborts or aborts[-1] < PROMPTS:
            await asyncio.sleep(0)
            aborts.append(sum(isinstance(message, AbortReq) for _, message in engine.sent))
        assert len(set(aborts)) > PROMPTS // 4, "a few in each turn"
        assert not served.manager.requests.states


async def test_prompts_are_aborted_by_request_in_turns(engine_of: EngineOf, http_of: HttpOf) -> None:
    engine = engine_of(auto=False)
    async with serving(engine) as served:
        many = ask_many(http_of(served))
        await until(lambda: len(sent(engine)) == PROMPTS)
        states = list(served.manager.requests.states.values())
        shorten_turns(served)
        served.manager.requests.abort(states[0].rid.rpartition(".")[0])
        assert 0 < sum(state.aborted for state in states) < PROMPTS // 4
        await until(lambda: all(state.aborted for state in states))
        assert (await many).status_code == 499
