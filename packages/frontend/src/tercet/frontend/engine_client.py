"""The engine's side of the messages: a frontend without HTTP, on an event loop in a thread of its own."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tercet.frontend.answer import Whole, collect
from tercet.frontend.generate_request import GenerateRequest
from tercet.frontend.generation import Generation
from tercet.frontend.model_registry import ModelRegistry
from tercet.frontend.router import DataParallelController
from tercet.frontend.routing_policy import POLICIES
from tercet.frontend.served_model import ServedModel
from tercet.frontend.tokenizer_manager import TokenizerManager
from tercet.protocol.aio import AsyncNode
from tercet.protocol.config import NodeConfig
from tercet.protocol.events import Delivery
from tercet.protocol.messages import FrontendInbox, Heartbeat
from tercet.protocol.values import Role

_Result = TypeVar("_Result")

AT_ONCE = 512
"""Prompts sent to the schedulers at a time; they batch as many as they have room for."""
FILES = 30.0
"""Seconds for the tokenizer's files to arrive once every part is ready."""
POLL = 0.01


class EngineError(RuntimeError):
    """The engine could not be started, or is shut down; the text says why."""


class EngineClient:
    """`run`, `wait` and `close` are for other threads; the coroutines they are given run in this one's loop."""

    def __init__(self, directory: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="tokenizer")
        self._limit = asyncio.Semaphore(AT_ONCE)
        address = f"ipc://{directory}"
        specs = (f"{address}/scheduler-*", f"{address}/detokenizer-*")
        config = NodeConfig(Role.FRONTEND, "engine-0", address, connect=specs)
        self._node = AsyncNode(config, FrontendInbox, self._status, self._on_deliveries)
        controller = DataParallelController(POLICIES["round_robin"]())
        self._manager = TokenizerManager(config.peer, self._node, self._pool, ModelRegistry(self._pool), controller)
        self._thread.start()
        self.wait(self._start())

    @property
    def closed(self) -> bool:
        """Whether nothing can be asked any more."""
        return self._loop.is_closed()

    def run(self, work: Coroutine[Any, Any, _Result]) -> "Future[_Result]":
        """Start a coroutine on the loop. Raises EngineError after `close`."""
        if self.closed:
            work.close()
            raise EngineError("the engine is shut down")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The result of a coroutine; it is cancelled if the waiting is interrupted."""
        future = self.run(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Say goodbye to the parts; whoever still waits for an answer gets CancelledError."""
        if not self.closed:
            self.wait(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def served(self) -> ServedModel:
        """The model, once requests for it can be sent. Raises EngineError when that does not come to be."""
        try:
            async with asyncio.timeout(FILES):
                while not self._manager.ready:  # noqa: ASYNC110  # it tells nobody
                    await asyncio.sleep(POLL)
        except TimeoutError:
            raise EngineError(
                "the parts are ready, but the model's tokenizer files did not come or do not load"
            ) from None
        return next(iter(self._manager.models))

    async def whole(self, request: GenerateRequest) -> tuple[Generation, list[Whole]]:
        """Every choice when all have ended. Raises ApiError."""
        async with self._limit:
            generation = await self._manager.submit([request])
            try:
                return generation, await collect(generation, generation.arrivals())
            finally:
                self._manager.release(generation)

    async def choices(self, request: GenerateRequest) -> AsyncGenerator[tuple[Generation, Whole], None]:
        """Each choice whenever there is more of it; the same object each time. Raises ApiError."""
        async with self._limit:
            generation = await self._manager.submit([request])
            try:
                (state,) = generation.states
                choices = [Whole(state, 0, choice.index, "", [], None) for choice in state.choices]
                async for news in generation.arrivals():
                    for update in (arrival.update for arrival in news):
                        choice = choices[update.index]
                        choice.text += update.text
                        choice.logprobs += update.logprobs
                        choice.finish = update.finish
                        yield generation, choice
            finally:
                self._manager.release(generation)

    async def _start(self) -> None:
        await self._node.start()
        self._manager.start()

    async def _stop(self) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting, return_exceptions=True)
        await self._manager.close()
        await self._node.close("the engine is shut down")
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()

    def _status(self, peer: str) -> Heartbeat:
        return self._manager.heartbeat(peer)

    def _on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        self._manager.on_deliveries(deliveries)
