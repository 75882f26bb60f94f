"""TokenizerManager in front of a scripted engine, without HTTP."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerateRequest, GenerationOptions
from tercet.frontend.manager.request_reports import Report
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.prompts import TokenPrompt
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import RoundRobin
from tercet.frontend.testing.engine import FakeEngine
from tercet.protocol.messages.values import FinishReason


@contextlib.asynccontextmanager
async def managed(
    engine: FakeEngine,
    recovery_timeout: float = 60.0,
    max_waiting: int = 256,
    clock: Callable[[], float] = time.monotonic,
    reports: Sequence[Report] = (),
) -> AsyncIterator[TokenizerManager]:
    """Yield a manager whose engine's peers are up and whose model is ready; `step` of the engine advances it."""
    engine.auto = False
    with ThreadPoolExecutor(1) as pool:
        dispatcher = Dispatcher(engine, RoundRobin(), recovery_timeout, max_waiting)
        requests = RequestTable("frontend-0", dispatcher, clock=clock)
        for report in reports:
            requests.reports.add(report)
        manager = TokenizerManager(engine, ModelRegistry(pool), requests)
        engine.deliver = manager.on_deliveries
        engine.connect()
        async with asyncio.timeout(10):
            while not manager.ready:  # noqa: ASYNC110 - readiness comes with the tokenizer, from a thread
                await asyncio.sleep(0.001)
        manager.start()
        yield manager
        await manager.close()


async def submit(manager: TokenizerManager, n: int = 1, max_tokens: int = 50, prompt: int = 3) -> Generation:
    """Submit a request with a prompt of `prompt` tokens."""
    ids = TokenPrompt(list(range(1, prompt + 1)))
    request = GenerateRequest(model="tiny", prompt=ids, options=GenerationOptions(n=n, max_tokens=max_tokens))
    return await manager.submit([request])


def received_choices(generation: Generation) -> list[tuple[str, list[int], FinishReason | None]]:
    """Return text, ids and finish of each choice of a single request, as its consumer receives them."""
    [state] = generation.states
    texts = {choice.index: "" for choice in state.choices}
    finishes: dict[int, FinishReason | None] = {}
    for update in state.pop_updates():
        texts[update.index] += update.text
        finishes[update.index] = update.finish
    return [(texts[each.index], each.token_ids.tolist(), finishes.get(each.index)) for each in state.choices]
