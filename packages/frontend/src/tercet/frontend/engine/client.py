"""Client side of an `Engine`: a frontend without HTTP, on an event loop in a thread of its own."""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from tercet.frontend.api.generation_response import FinishedChoice, collect
from tercet.frontend.lora.registry import LOAD_TIMEOUT
from tercet.frontend.manager.embedding_state import EmbeddingBatch
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.tokenizer_manager import TokenizerManager
from tercet.frontend.model.embedding_request import EmbeddingRequest
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.policies import POLICIES
from tercet.protocol.aio import AsyncNode
from tercet.protocol.config import NodeConfig
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.full_inbox import FullFrontendInbox
from tercet.protocol.messages.messages import Heartbeat
from tercet.protocol.messages.values import LoRAAdapter, Role
from tercet.protocol.transport.endpoints import is_supervised_id

_Result = TypeVar("_Result")
Work = Callable[[], Coroutine[Any, Any, _Result]]
"""Factory of a coroutine, called on the loop, so that no coroutine is left unawaited if the loop ends before."""

MAX_IN_FLIGHT = 512
"""Prompts sent to the schedulers at a time; schedulers batch as many as they have memory for."""
TOKENIZER_FILES_TIMEOUT = 30.0
"""Seconds for the tokenizer's files to arrive once every part is ready."""
POLL_INTERVAL = 0.01
_CLOSED = "the engine is shut down"
_THREADS = 2
"""Threads that render templates and tokenize."""


class EngineError(RuntimeError):
    """The engine could not be started, or is shut down; the text says why."""


class OutputStream(Generic[_Result]):
    """Async generator that is advanced step by step on the loop. `close` waits for a `next` that is being cancelled."""

    def __init__(self, answers: AsyncGenerator[_Result, None]) -> None:
        self._answers = answers
        self._step = asyncio.Lock()

    async def next(self) -> _Result | None:
        """Return the next item; None after the last."""
        async with self._step:
            return await anext(self._answers, None)

    async def close(self) -> None:
        """Close the generator."""
        async with self._step:
            await self._answers.aclose()


class EngineClient:
    """Thread-safe client: other threads call `run`, `wait` and `close`; coroutines run on the client's own loop."""

    def __init__(self, directory: Path, lora: Mapping[str, str]) -> None:
        """Start the loop. `lora` maps names of adapters to their paths."""
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-client", daemon=True)
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenizer")
        self._limit = asyncio.Semaphore(MAX_IN_FLIGHT)
        self._unusable_reason = ""
        """Reason why the model can never be served."""
        address = f"ipc://{directory}"
        specs = (f"{address}/scheduler-*", f"{address}/detokenizer-*")
        config = NodeConfig(Role.FRONTEND, "engine-0", address, connect=specs)
        self._node = AsyncNode(config, FullFrontendInbox, self._status, self._on_deliveries)
        dispatcher = Dispatcher(self._node, POLICIES["round_robin"]())
        registry = ModelRegistry(self._pool, threads=_THREADS, on_unreadable=self._on_unreadable)
        self._manager = TokenizerManager(self._node, registry, RequestTable(config.peer, dispatcher), lora)
        self._adapter_timeout = LOAD_TIMEOUT * len(lora)
        self._thread.start()
        self.wait(self._start)

    def run(self, work: Work[_Result]) -> "Future[_Result]":
        """Start a coroutine on the loop. Raises EngineError after `close`, and in a fork of the process."""
        if os.getpid() != self._owner:
            raise EngineError("this process is a fork of the one that made the engine: make one here")
        with self._lock:
            if self._closed:
                raise EngineError(_CLOSED)
            return asyncio.run_coroutine_threadsafe(self._until_closed(work), self._loop)

    def wait(self, work: Work[_Result]) -> _Result:
        """Return the result of a coroutine; an interrupt of the wait cancels it."""
        future = self.run(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Close the links to the parts; pending requests raise EngineError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._stop(), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def wait_until_ready(self) -> ServedModel:
        """Return the model once it can serve requests. Raises EngineError if it never can."""
        seconds = TOKENIZER_FILES_TIMEOUT
        try:
            async with asyncio.timeout(seconds):
                while not self._manager.ready:  # there is no event for it
                    if self._unusable_reason:
                        raise EngineError(self._unusable_reason)
                    await asyncio.sleep(POLL_INTERVAL)
        except TimeoutError:
            linked = ", ".join(sorted(info.peer for info in self._node.peers())) or "nobody"
            missed = f"the parts are ready, but the model's tokenizer files did not come within {seconds:g} s"
            raise EngineError(f"{missed} (linked: {linked})") from None
        return next(iter(self._manager.models))

    async def loaded_adapters(self) -> dict[str, LoRAAdapter]:
        """Return the adapters by name once schedulers have loaded them. Raises EngineError if they cannot."""
        adapters = self._manager.adapters
        try:
            async with asyncio.timeout(self._adapter_timeout):
                refusals = await adapters.refusals()
        except TimeoutError:
            raise EngineError("the schedulers have not read every adapter in time") from None
        for name, refusal in refusals.items():
            raise EngineError(f"the adapter {name!r} cannot be used: {refusal}")
        return {each.name: each.lora for each in await adapters.all()}

    async def update_weights(self, path: str) -> None:
        """Let all schedulers load the weights of a directory. Raises ApiError."""
        await self._manager.weights.update(path)

    async def generate(self, request: GenerateRequest) -> tuple[Generation, list[FinishedChoice]]:
        """Return every choice when all have finished. Raises ApiError."""
        async with self._limit:
            generation = await self._manager.submit([request])
            try:
                return generation, await collect(generation, generation.arrivals())
            finally:
                self._manager.release(generation)

    async def embed(self, request: EmbeddingRequest) -> EmbeddingBatch:
        """Return every input with its vector. Raises ApiError."""
        async with self._limit:
            return await self._manager.embed(request)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[tuple[Generation, FinishedChoice], None]:
        """Yield a choice whenever it has grown; the object of a choice is always the same. Raises ApiError."""
        async with self._limit:
            generation = await self._manager.submit([request])
            try:
                (state,) = generation.states
                choices = [FinishedChoice(state, 0, choice.index, "", [], None) for choice in state.choices]
                async for news in generation.arrivals():
                    for update in (arrival.update for arrival in news):
                        choice = choices[update.index]
                        choice.text += update.text
                        choice.logprobs += update.logprobs
                        choice.finish = update.finish
                        yield generation, choice
            finally:
                self._manager.release(generation)

    async def _until_closed(self, work: Work[_Result]) -> _Result:
        try:
            return await work()
        except asyncio.CancelledError:
            if self._closed:
                raise EngineError(_CLOSED) from None
            raise

    async def _start(self) -> None:
        await self._node.start()
        self._manager.start()

    async def _stop(self) -> None:
        waiting = asyncio.all_tasks() - {asyncio.current_task()}
        for task in waiting:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*waiting, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._manager.close()
        self._node.close_now(_CLOSED)

    def _on_unreadable(self, peer: str, reason: str) -> None:
        if is_supervised_id(peer):
            self._unusable_reason = reason

    def _status(self, peer: str) -> Heartbeat:
        return self._manager.heartbeat(peer)

    def _on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        self._manager.on_deliveries(deliveries)
