"""`TokenizerManager`: validates, tokenizes and dispatches requests. `MessageHandler` receives their output."""

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

from msgspec import structs

from tercet.frontend.errors import (
    BadRequestError,
    RateLimitError,
    RequestAbortedError,
    UnavailableError,
    UnsupportedParameterError,
)
from tercet.frontend.lora.registry import AdapterRegistry
from tercet.frontend.lora.store import AdapterNames
from tercet.frontend.manager.counters import Counters, RequestOutcome
from tercet.frontend.manager.embedding_batch import EmbeddingBatch
from tercet.frontend.manager.embedding_state import EmbeddingState
from tercet.frontend.manager.generation import Generation
from tercet.frontend.manager.message_handler import MessageHandler
from tercet.frontend.manager.peer_metrics import PeerMetrics
from tercet.frontend.manager.prediction import MAX_PREDICTION_TOKENS
from tercet.frontend.manager.quota import ApiKeyQuota, RequestSlot
from tercet.frontend.manager.req_state import ReqState
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.manager.series import frontend_series
from tercet.frontend.manager.validation import check_length, check_output, check_scores, check_stops, sampling
from tercet.frontend.model.embedding_request import EmbeddingRequest, size_of
from tercet.frontend.model.input_encoder import InputEncoder
from tercet.frontend.model.prompts import TextPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.model.tokenizer_pool import LONG, Piece
from tercet.frontend.routing.control import Control
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.peers import PeerRegistry
from tercet.frontend.routing.recovery import Recovery
from tercet.frontend.routing.request_state import RequestState
from tercet.frontend.routing.router import DataParallelController
from tercet.frontend.routing.weight_updates import WeightUpdates
from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import AbortReq, Heartbeat, Series
from tercet.protocol.messages.values import Load, Phase, Task, belongs
from tercet.protocol.node import Sender

_DRAINING = "This server is leaving."
_RETRY_INTERVAL = 0.5
_TICKS_PER_FILE_REQUEST = 10
"""Calls of `tick` between requests for tokenizer files that have not arrived."""
_TICKS_PER_ADAPTER_RETRY = 60
"""Calls of `tick` between retries of adapters that schedulers refused."""
_INPUTS_PER_JOB = 64
"""Inputs tokenized in one job: the threads are shared with all other prompts."""


def _noop() -> None:
    pass


class TokenizerManager:
    """Entry point of every request. Methods run on the event loop's thread; only tokenization uses other threads.

    `on_servable` is called once, when the first request could be served. `lora` maps adapter names to paths;
    `adapter_names` stores adapters that are loaded at run time, by default in memory. `siblings` are the ids of the
    frontends that share this one's socket.
    """

    def __init__(
        self,
        peer: str,
        outbox: Sender,
        registry: ModelRegistry,
        controller: DataParallelController,
        recovery_timeout: float = 60.0,
        max_waiting: int = 256,
        on_servable: Callable[[], None] = _noop,
        clock: Callable[[], float] = time.monotonic,
        quota: ApiKeyQuota | None = None,
        lora: Mapping[str, str] | None = None,
        adapter_names: AdapterNames | None = None,
        siblings: Iterable[str] = (),
    ) -> None:
        self.peer = peer
        self.fleet = PeerRegistry()
        self.models = registry
        self.counters = Counters()
        self.control = Control(outbox, self.fleet)
        self.peer_metrics = PeerMetrics(outbox, siblings, self.series)
        self.adapters = AdapterRegistry(registry, self.fleet, self.control, lora or {}, adapter_names)
        self.weights = WeightUpdates(registry, self.fleet, self.control)
        self.grammars = GrammarChecker()
        self._refuse_after: float | None = None
        self._clock = clock
        self._quota = quota or ApiKeyQuota()
        self._on_servable: Callable[[], None] | None = on_servable
        self._states: dict[str, RequestState] = {}
        self._dispatcher = Dispatcher(outbox, self.fleet, controller)
        self._recovery = Recovery(self._dispatcher, self.counters.redispatches, recovery_timeout, max_waiting)
        self._message_handler = MessageHandler(
            outbox,
            self.fleet,
            registry,
            self._dispatcher,
            self._recovery,
            self._states,
            self.counters,
            self.control,
            self.peer_metrics,
            clock,
            self._on_peers_changed,
        )
        self._ticking: asyncio.Task[None] | None = None
        self._ticks = 0

    @property
    def running(self) -> int:
        """Return the number of requests that have not been released."""
        return len(self._states)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a scheduler or detokenizer."""
        return len(self._recovery)

    @property
    def draining(self) -> bool:
        """Return whether this frontend exits as soon as its requests have finished."""
        return self._refuse_after is not None

    @property
    def ready(self) -> bool:
        """Return whether some model has a ready scheduler, and a ready detokenizer if it generates text."""
        has_text = bool(self.fleet.eligible_detokenizers())
        return not self.draining and any(
            (has_text or model.limits.task is not Task.GENERATE)
            and self.fleet.eligible_schedulers(model.identity.weights)
            for model in self.models
        )

    def heartbeat(self, peer: str) -> Heartbeat:  # noqa: ARG002
        busy = Phase.STEP if self._states else Phase.IDLE
        load = Load(queued=self.waiting, running=len(self._states))
        return Heartbeat(phase=Phase.DRAINING if self.draining else busy, load=load)

    def series(self, number: str = "") -> Series:
        return frontend_series(number, self.counters, self.fleet, self.running, self.waiting)

    def start(self) -> None:
        """Start the periodic retries."""
        self._ticking = asyncio.create_task(self._tick_forever())

    def drain(self, last_call: float) -> None:
        """Stop being ready. Requests of the next `last_call` seconds are still served; those in flight finish."""
        if self._refuse_after is None:
            self._refuse_after = self._clock() + last_call

    def fail_all(self) -> None:
        """Fail every open request with an UnavailableError."""
        for state in self._states.values():
            state.fail(UnavailableError(_DRAINING, retry_after=1))

    async def close(self) -> None:
        """Stop the background tasks."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.adapters.close()
        await self.weights.close()
        await self._message_handler.close()
        await self.grammars.close()

    def new_id(self) -> str:
        """Return an unguessable request id that contains this frontend's peer id."""
        return f"{self.peer}-{secrets.token_urlsafe(18)}"

    def further_id(self, rid: str) -> str:
        """Return an id for a restarted request; aborting `rid` aborts it, too."""
        return f"{rid}.{secrets.randbits(63)}"

    async def submit(self, requests: Sequence[GenerateRequest], rid: str = "") -> Generation:
        """Dispatch requests under an id from `new_id`. The caller must call `release`.

        Raises ApiError if any request cannot run; none of them runs then.
        """
        answers = sum(each.sampling.n for each in requests)
        names = requests[0].param_names
        slot = self._admit(answers, names.n if requests[0].sampling.n > 1 else requests[0].prompt.param)
        try:
            return await self._submit([self._quota.with_tenant(each) for each in requests], rid, slot)
        except BaseException:
            slot.release()
            raise

    async def _submit(self, requests: Sequence[GenerateRequest], rid: str, slot: RequestSlot) -> Generation:
        model = self.models.get(requests[0].model)
        if model.limits.task is not Task.GENERATE:
            what = "classifies" if model.limits.task is Task.CLASSIFY else "embeds"
            raise BadRequestError(f"The model {model.name!r} {what} and generates no text.", param="model")
        for request in requests:  # cheap checks first: grammars may have to wait for a worker
            check_stops(request)
            check_length(request, model)
        await self._check_grammars(requests, model)
        prompts = await model.tokenize_all([request.prompt for request in requests])
        predictions = [await _prediction(request, model) for request in requests]
        params = [sampling(request, model, len(ids)) for request, ids in zip(requests, prompts, strict=True)]
        check_output(requests, params)
        check_scores(requests, params, [len(ids) for ids in prompts])
        generation, rid = Generation(slot), rid or self.new_id()
        every = zip(requests, prompts, params, predictions, strict=True)
        for number, (request, ids, chosen, prediction) in enumerate(every):
            own = rid if len(requests) == 1 else f"{rid}.{number}"
            generation.states.append(ReqState(own, request, model, ids, chosen, generation.wake, prediction))
        try:
            for state in generation.states:
                self._start(state)
        except UnavailableError:
            self.release(generation)
            raise
        return generation

    async def embed(self, request: EmbeddingRequest, rid: str = "") -> EmbeddingBatch:
        """Return the vectors of all inputs, under an id from `new_id`. Raises ApiError.

        Cancelling the call aborts the inputs that still run.
        """
        slot = self._admit()
        try:
            return await self._embed(structs.replace(request, tenant=self._quota.tenant()), rid, slot)
        finally:
            slot.release()

    async def _embed(self, request: EmbeddingRequest, rid: str, slot: RequestSlot) -> EmbeddingBatch:
        model = self.models.get(request.model)
        if model.limits.task is Task.GENERATE:
            message = f"The model {model.name!r} generates text: it makes no vectors or scores."
            raise BadRequestError(message, param="model")
        encode = InputEncoder(request, model).encode
        pieces = [Piece(partial(encode, indices), size) for indices, size in _pieces_of(request)]
        parts = await model.tokenizer_pool.run_all(pieces)
        encoded = itertools.chain.from_iterable(parts)
        batch, rid = EmbeddingBatch(slot), rid or self.new_id()
        for number, (each, param) in enumerate(zip(encoded, request.params, strict=True)):
            batch.states.append(EmbeddingState(f"{rid}.{number}", each, model, request, batch.wake, param))
        try:
            await batch.run(self._start)
        finally:
            self.release(batch)
        return batch

    def _admit(self, answers: int = 1, param: str | None = None) -> RequestSlot:
        """Reserve quota for this number of answers. Raises ApiError, naming `param` if there are too many."""
        if self._refuse_after is not None and self._clock() >= self._refuse_after:
            raise UnavailableError(_DRAINING, retry_after=1)
        try:
            return self._quota.acquire(answers, param)
        except RateLimitError:
            self.counters.over_limit += 1
            raise

    def _start(self, state: RequestState) -> None:
        """Dispatch or enqueue a request. Raises UnavailableError if neither is possible."""
        now = self._clock()
        self._states[state.rid] = state
        state.started_at = now
        if not self._recovery.submit(state, now):
            state.fail(UnavailableError("No scheduler takes requests now.", retry_after=1))
            raise UnavailableError("No scheduler takes requests now.", retry_after=1)

    async def _check_grammars(self, requests: Sequence[GenerateRequest], model: ServedModel) -> None:
        """Compile every grammar before anything is dispatched. Raises ApiError."""
        asked = {each.grammar: each.param_names.grammar for each in requests if each.grammar is not None}
        weights = model.identity.weights
        if asked and not (model.limits.grammars or self.fleet.eligible_schedulers(weights, grammars=True)):
            [param, *_] = asked.values()
            raise UnsupportedParameterError("This model's answers cannot be constrained.", param=param)
        for grammar, param in (trial for each in requests for trial in each.trials):
            await self.grammars.check(grammar, model, param)  # sequentially: the queue for checks is short
        await asyncio.gather(*(self.grammars.check(grammar, model, param) for grammar, param in asked.items()))

    def release(self, asked: Generation | EmbeddingBatch) -> None:
        """Forget requests and abort those that still run. Idempotent."""
        asked.slot.release()
        for state in asked.states:
            if self._states.pop(state.rid, None) is None:
                continue
            outcome = _outcome(state)
            self.counters.outcomes[outcome] += 1
            self.counters.resumed_finished += outcome is RequestOutcome.FINISHED and state.attempt > 0
            self._recovery.forget(state)
            self._dispatcher.release(state)
            if state.open_indices and state.scheduler:
                self._dispatcher.abort(state, [], "the client is gone")

    def abort(self, rid: str) -> None:
        """Abort the requests with this id, or all requests that one HTTP request was split into.

        Schedulers are asked to abort requests of other frontends. Consumers of an aborted request get
        RequestAbortedError.
        """
        own = [state for state in self._states.values() if belongs(state.rid, rid)]
        for state in own:
            state.fail(RequestAbortedError("The request was aborted."))
        if not own:
            for scheduler in self.fleet.schedulers:
                self._dispatcher.send_abort(
                    scheduler, AbortReq(rid=rid, reason="aborted by request", user_requested=True)
                )

    def abort_all(self) -> None:
        """Abort every request, including those of other frontends."""
        for state in self._states.values():
            state.fail(RequestAbortedError("The request was aborted."))
        for scheduler in self.fleet.schedulers:
            self._dispatcher.send_abort(scheduler, AbortReq(rid="", reason="all are aborted", user_requested=True))

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        self._message_handler.handle(deliveries)

    def tick(self) -> None:
        """Retry waiting requests, and request missing files, adapters and weights. Called twice a second."""
        self._ticks += 1
        self._recovery.retry(self._clock())
        if self._ticks % _TICKS_PER_FILE_REQUEST == 0:
            self._message_handler.request_files()
        self.adapters.tick(again=self._ticks % _TICKS_PER_ADAPTER_RETRY == 0)
        self.weights.tick()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_INTERVAL)
            self.tick()

    def _on_peers_changed(self) -> None:
        """React to a change of the usable peers."""
        self.adapters.tick()
        self.weights.tick()
        if self._on_servable is not None and self.ready:
            on_servable, self._on_servable = self._on_servable, None
            on_servable()


async def _prediction(request: GenerateRequest, model: ServedModel) -> Sequence[int]:
    """Tokenize the predicted output. Raises ApiError."""
    if not request.prediction:
        return ()
    text = TextPrompt(request.prediction, add_special_tokens=False, param="prediction")
    return (await model.tokenize(text, must_fit=False))[:MAX_PREDICTION_TOKENS]


def _pieces_of(request: EmbeddingRequest) -> Iterator[tuple[list[int], int]]:
    """Yield the indices of inputs that are tokenized in one job, and their total number of characters."""
    indices: list[int] = []
    size = 0
    for index, given in enumerate(request.inputs):
        more = size_of(given)
        if indices and (len(indices) == _INPUTS_PER_JOB or size + more >= LONG):
            yield indices, size
            indices, size = [], 0
        indices.append(index)
        size += more
    yield indices, size


def _outcome(state: RequestState) -> RequestOutcome:
    if state.error is not None:
        return RequestOutcome.FAILED if state.error.status == 500 else RequestOutcome.REFUSED
    return RequestOutcome.FINISHED if state.done else RequestOutcome.CLIENT_GONE
