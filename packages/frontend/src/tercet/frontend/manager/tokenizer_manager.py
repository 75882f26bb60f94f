"""`TokenizerManager`: validates, tokenizes and dispatches requests. `MessageHandler` receives their output."""

import asyncio
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count

from msgspec import structs

from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.http.auth import current_caller
from tercet.frontend.http.loop_turns import Steps
from tercet.frontend.lora.registry import AdapterRegistry
from tercet.frontend.lora.store import AdapterNames
from tercet.frontend.manager.embedding_state import EmbeddingBatch, EmbeddingState
from tercet.frontend.manager.inputs.grammars import with_checked_grammars
from tercet.frontend.manager.inputs.images import tokenize_all
from tercet.frontend.manager.inputs.prediction import prediction_of
from tercet.frontend.manager.inputs.validation import cheap_checks, check_output, check_scores, sampling_of_all
from tercet.frontend.manager.media_encodings import placed_media
from tercet.frontend.manager.message_handler import MessageHandler
from tercet.frontend.manager.peer_metrics import PeerMetrics
from tercet.frontend.manager.quota import RequestSlot
from tercet.frontend.manager.req_state import Generation, ReqState
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.series import frontend_series
from tercet.frontend.manager.status_feed import StatusFeed
from tercet.frontend.media.audio_decoder import AudioDecoder
from tercet.frontend.media.image_decoder import Fetcher, ImageDecoder
from tercet.frontend.media.video.decoder import VideoDecoder
from tercet.frontend.model.embedding_request import EmbeddingRequest
from tercet.frontend.model.input_encoder import encode_all
from tercet.frontend.routing.control import Control
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.weight_updates import WeightUpdates
from tercet.frontend.structured_output.checker import GrammarChecker
from tercet.protocol.membership.events import Delivery
from tercet.protocol.messages.messages import Heartbeat, Series
from tercet.protocol.messages.values import Load, Phase, Task
from tercet.protocol.node import Sender

_DRAINING = "This server is leaving."
_RETRY_INTERVAL = 0.5
_TICKS_PER_FILE_REQUEST = 10
"""Calls of `tick` between requests for tokenizer files that have not arrived."""
_TICKS_PER_ADAPTER_RETRY = 60
"""Calls of `tick` between retries of adapters that schedulers refused."""


class TokenizerManager:
    """Entry point of every request. Methods run on the event loop's thread; only tokenization uses other threads.

    `lora` maps adapter names to paths; `adapter_names` stores adapters that are loaded at run time, by default in
    memory. `siblings` are the ids of the frontends that share this one's socket. `fetcher` reads images at URLs.
    """

    def __init__(
        self,
        outbox: Sender,
        models: ModelRegistry,
        requests: RequestTable,
        lora: Mapping[str, str] | None = None,
        adapter_names: AdapterNames | None = None,
        siblings: Iterable[str] = (),
        fetcher: Fetcher | None = None,
    ) -> None:
        self.peer = requests.peer
        self.models = models
        self.requests = requests
        self.counters = requests.counters
        self.fleet = requests.dispatcher.peers
        self.control = Control(outbox, self.fleet)
        self.peer_metrics = PeerMetrics(outbox, siblings, self.series)
        self.adapters = AdapterRegistry(models, self.fleet, self.control, lora or {}, adapter_names)
        self.weights = WeightUpdates(models, self.fleet, self.control)
        self.grammars = GrammarChecker()
        self.images = ImageDecoder(fetcher=fetcher)
        self.audio = AudioDecoder()
        self.videos = VideoDecoder(fetcher=fetcher)
        self.status = StatusFeed(outbox, models, requests)
        self._message_handler = MessageHandler(
            outbox, models, requests, self.control, self.peer_metrics, self.status, self._on_peers_changed
        )
        self._refuse_after: float | None = None
        self._on_servable: Callable[[], None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._ticks = 0

    @property
    def running(self) -> int:
        """Return the number of requests that have not been released."""
        return len(self.requests)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a scheduler or detokenizer."""
        return self.requests.dispatcher.waiting

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
        busy = Phase.STEP if self.running else Phase.IDLE
        load = Load(queued=self.waiting, running=self.running)
        return Heartbeat(phase=Phase.DRAINING if self.draining else busy, load=load)

    def series(self, number: str = "") -> Series:
        return frontend_series(number, self.counters, self.fleet, self.running, self.waiting)

    def start(self, on_servable: Callable[[], None] | None = None) -> None:
        """Start the periodic retries. `on_servable` is called once, when the first request could be served."""
        self._ticking = asyncio.create_task(self._tick_forever())
        self._on_servable = on_servable
        self._tell_if_servable()

    def drain(self, last_call: float) -> None:
        """Stop being ready. Requests of the next `last_call` seconds are still served; those in flight finish."""
        if self._refuse_after is None:
            self._refuse_after = self.requests.clock() + last_call

    def fail_all(self) -> None:
        """Fail every open request with an UnavailableError."""
        for state in self.requests.states.values():
            state.fail(UnavailableError(_DRAINING, retry_after=1))

    async def close(self) -> None:
        """Stop the background tasks, and wait for the reports of requests that ended."""
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
        await self.adapters.close()
        await self.weights.close()
        await self._message_handler.close()
        await self.grammars.close()
        await self.images.close()
        await self.audio.close()
        await self.videos.close()
        await asyncio.gather(self.requests.turns.close(), self.requests.reports.close())

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
        answers, options = sum(each.options.n for each in requests), requests[0].options
        prompts = requests[0].prompt.param.partition("[")[0]
        slot = self._admit(answers, options.param_names.n if options.n > 1 else prompts)
        try:
            return await self._submit([self.requests.quota.with_tenant(each) for each in requests], rid, slot)
        except BaseException:
            slot.release()
            raise

    async def _submit(self, requests: Sequence[GenerateRequest], rid: str, slot: RequestSlot) -> Generation:
        model = self.models.get(requests[0].model)
        if model.limits.task is not Task.GENERATE:
            what = "classifies" if model.limits.task is Task.CLASSIFY else "embeds"
            raise BadRequestError(f"The model {model.name!r} {what} and generates no text.", param="model")
        in_turns = partial(self.requests.turns.run, current_caller().owner)
        await in_turns(cheap_checks(requests, model))  # first: grammars may have to wait for a worker
        requests = await with_checked_grammars(requests, model, self.grammars, self.fleet)
        prompts, images = await tokenize_all(self, [request.prompt for request in requests], model)
        predictions = [await prediction_of(request, model) for request in requests]
        params = await in_turns(sampling_of_all(requests, model, prompts))
        check_output(requests, params)
        check_scores(requests, params, [len(ids) for ids in prompts])
        generation, rid, tokenized_at = Generation(slot), rid or self.new_id(), self.requests.clock()
        placed = await placed_media(self.requests, requests, prompts, images, model, rid)
        names = [rid] if len(requests) == 1 else (f"{rid}.{number}" for number in count())
        every = zip(names, requests, prompts, params, predictions, placed, strict=False)

        def start() -> Steps[None]:
            for name, request, ids, chosen, prediction, shown in every:
                state = ReqState(name, request, model, ids, chosen, generation.wake, prediction, shown)
                generation.states.append(state)
                self.requests.start(state, tokenized_at if shown and model.limits.embeddings else None)
                yield

        try:
            await in_turns(start())
        except BaseException:
            self.release(generation)
            raise
        return generation

    async def embed(self, request: EmbeddingRequest, rid: str = "") -> EmbeddingBatch:
        """Return the vectors of all inputs, under an id from `new_id`. Raises ApiError.

        Cancelling the call aborts the inputs that still run.
        """
        slot = self._admit()
        try:
            return await self._embed(structs.replace(request, tenant=self.requests.quota.tenant()), rid, slot)
        finally:
            slot.release()

    async def _embed(self, request: EmbeddingRequest, rid: str, slot: RequestSlot) -> EmbeddingBatch:
        model = self.models.get(request.model)
        if model.limits.task is Task.GENERATE:
            raise BadRequestError(f"The model {model.name!r} generates text, no vectors or scores.", param="model")
        encoded = await encode_all(request, model)
        batch, rid = EmbeddingBatch(slot), rid or self.new_id()
        for number, (each, param) in enumerate(zip(encoded, request.params, strict=True)):
            batch.states.append(EmbeddingState(f"{rid}.{number}", each, model, request, batch.wake, param))
        try:
            await batch.run(self.requests.start)
        finally:
            self.release(batch)
        return batch

    def _admit(self, answers: int = 1, param: str | None = None) -> RequestSlot:
        """Reserve quota for this number of answers. Raises ApiError, naming `param` if there are too many."""
        if self._refuse_after is not None and self.requests.clock() >= self._refuse_after:
            raise UnavailableError(_DRAINING, retry_after=1)
        return self.requests.admit(answers, param)

    def release(self, asked: Generation | EmbeddingBatch) -> None:
        """Forget requests and abort those that still run. Idempotent."""
        self.requests.release(asked)

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        self._message_handler.handle(deliveries)

    def tick(self) -> None:
        """Retry waiting requests, and request missing files, adapters and weights. Called twice a second."""
        self._ticks += 1
        self.requests.dispatcher.retry(self.requests.clock())
        if self._ticks % _TICKS_PER_FILE_REQUEST == 0:
            self._message_handler.request_files()
        self.adapters.tick(again=self._ticks % _TICKS_PER_ADAPTER_RETRY == 0)
        self.weights.tick()
        self.status.tick()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(_RETRY_INTERVAL)
            self.tick()

    def _on_peers_changed(self) -> None:
        """React to a change of the usable peers."""
        self.adapters.tick()
        self.weights.tick()
        self._tell_if_servable()

    def _tell_if_servable(self) -> None:
        if self._on_servable is not None and self.ready:
            on_servable, self._on_servable = self._on_servable, None
            on_servable()
