"""Requests in, outputs out: tokenizes, validates, routes, and hands each row of text to its request."""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Coroutine, Sequence
from concurrent.futures import Executor
from typing import assert_never, cast

import msgspec

from tercet.frontend.dispatch import Dispatcher
from tercet.frontend.errors import BadRequestError, ContextLengthExceededError, UnavailableError, from_rejection
from tercet.frontend.fleet import Fleet
from tercet.frontend.generate_request import GenerateRequest
from tercet.frontend.generation import Generation
from tercet.frontend.model_registry import ModelRegistry
from tercet.frontend.recovery import Recovery
from tercet.frontend.req_state import ReqState, Verdict, rows_of
from tercet.frontend.router import DataParallelController
from tercet.frontend.served_model import ServedModel
from tercet.protocol.events import Delivery, PeerDown, PeerReady, PeerUp
from tercet.protocol.messages import (
    BatchStrOutput,
    ControlReply,
    FrontendInbox,
    Goodbye,
    Heartbeat,
    Hello,
    Introduce,
    Progress,
    Ready,
    Rejected,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.node import Sender
from tercet.protocol.values import Load, Phase, Role, SamplingParams

logger = logging.getLogger(__name__)

_RETRY_INTERVAL = 0.5
_TICKS_TO_ASK_AGAIN = 10
"""For tokenizer files that have not come."""

Incoming = FrontendInbox | PeerUp | PeerReady | PeerDown
"""All that a frontend's node delivers: it decodes nothing else."""


class TokenizerManager:
    """The frontend's side of every request. All methods run on the event loop's thread; only tokenization does not."""

    def __init__(
        self,
        peer: str,
        outbox: Sender,
        pool: Executor,
        registry: ModelRegistry,
        controller: DataParallelController,
        recovery_timeout: float = 60.0,
    ) -> None:
        self.fleet = Fleet()
        self.models = registry
        self._peer = peer
        self._outbox = outbox
        self._pool = pool
        self._dispatcher = Dispatcher(outbox, self.fleet, controller)
        self._recovery = Recovery(self._dispatcher, recovery_timeout)
        self._states: dict[str, ReqState] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """Requests without a final answer."""
        return len(self._states)

    @property
    def ready(self) -> bool:
        """Whether some model has a scheduler and a detokenizer that take requests now."""
        return bool(self.fleet.eligible_detokenizers()) and any(
            self.fleet.eligible_schedulers(model.identity.weights) for model in self.models
        )

    def heartbeat(self, peer: str) -> Heartbeat:  # noqa: ARG002
        """What this frontend tells its peers of itself."""
        return Heartbeat(phase=Phase.STEP if self._states else Phase.IDLE, load=Load(running=len(self._states)))

    def start(self) -> None:
        """Begin to look after requests that wait for a part."""
        self._spawn(self._retry_forever())

    async def close(self) -> None:
        """Stop the background work."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Requests.

    async def submit(self, requests: Sequence[GenerateRequest]) -> Generation:
        """Send requests on their way. Raises ApiError, and then none of them runs. Whoever submits must `release`."""
        model = self.models.get(requests[0].model)
        if not (self.fleet.eligible_detokenizers() and self.fleet.eligible_schedulers(model.identity.weights)):
            raise UnavailableError("The model is not ready.", retry_after=1)
        loop = asyncio.get_running_loop()
        prompts = await asyncio.gather(
            *(loop.run_in_executor(self._pool, model.prompt_ids, request.prompt) for request in requests)
        )
        params = [sampling(request, model, len(ids)) for request, ids in zip(requests, prompts, strict=True)]
        generation = Generation()
        for request, ids, chosen in zip(requests, prompts, params, strict=True):
            rid = f"{self._peer}-{secrets.token_urlsafe(18)}"
            generation.states.append(ReqState(rid, request, model, ids, chosen, generation.wake))
        for state in generation.states:
            self._states[state.rid] = state
            if not self._dispatcher.dispatch(state):
                self.release(generation)
                raise UnavailableError("No scheduler takes requests now.", retry_after=1)
        return generation

    def release(self, generation: Generation) -> None:
        """Forget requests, and abort what still runs of them. Harmless when called again."""
        for state in generation.states:
            if self._states.pop(state.rid, None) is not None and state.open_indices:
                self._recovery.forget(state)
                self._dispatcher.abort(state, [], "the client is gone")

    # Deliveries.

    def on_deliveries(self, deliveries: Sequence[Delivery]) -> None:
        """Everything that peers said since the last call."""
        for delivery in deliveries:
            self._on_delivery(delivery.source, cast("Incoming", delivery.message), delivery.frames)

    def _on_delivery(self, source: str, message: Incoming, frames: tuple[memoryview, ...]) -> None:
        match message:
            case BatchStrOutput():
                self._on_text(source, message)
            case Heartbeat():
                self.fleet.heartbeat(source, message)
            case Rejected():
                self._on_rejected(source, message)
            case TokenizerFiles():
                self._spawn(self._load(source, message, frames))
            case PeerUp():
                self._on_up(message)
            case PeerReady():
                self._on_ready(message)
            case PeerDown():
                self._on_down(message.peer)
            case ControlReply():
                logger.info("%s answered %s: %s %s", source, message.id, message.ok, message.message)
            case Hello() | Introduce() | Ready() | Progress() | Goodbye():
                logger.debug("membership of %s is the node's business: %s", source, type(message).__name__)
            case _:
                assert_never(message)

    def _on_text(self, source: str, batch: BatchStrOutput) -> None:
        try:
            rows = list(rows_of(batch))
        except ValueError as error:
            logger.error("%s sent text that makes no sense: %s", source, error)
            return
        for rid, row in rows:
            state = self._states.get(rid)
            if state is None:
                continue
            verdict = state.accept(row)
            if verdict is Verdict.GAP:
                logger.warning("tokens of %s before position %d are missing", rid, row.position)
                self._recovery.again(state, self._now())
            elif verdict is Verdict.ACCEPTED and row.finish is not None and isinstance(row.finish.matched, str):
                self._dispatcher.abort(state, [row.index], "stop string")

    def _on_rejected(self, source: str, message: Rejected) -> None:
        state = self._states.get(message.rid)
        if state is None or state.attempt != message.attempt or state.scheduler != source:
            return
        state.refused_by.add(source)
        state.scheduler = ""
        eligible = self.fleet.eligible_schedulers(state.model.identity.weights)
        elsewhere = any(each.peer not in state.refused_by for each in eligible)
        if message.retry and elsewhere:
            self._recovery.again(state, self._now())
        elif message.retry and state.output_tokens:
            self._recovery.later(state, self._now())
        else:
            state.fail(from_rejection(message.code, message.message, message.retry))

    def _on_up(self, up: PeerUp) -> None:
        known = self.fleet.schedulers.get(up.peer) or self.fleet.detokenizers.get(up.peer)
        if known is not None and known.incarnation != up.incarnation:
            self._on_down(up.peer)
        if self.fleet.add(up.peer, up.role, up.incarnation) and up.role is Role.SCHEDULER:
            self._outbox.send(up.peer, TokenizerFilesReq(id=up.incarnation))

    def _on_ready(self, ready: PeerReady) -> None:
        match ready.role:
            case Role.SCHEDULER:
                if self.fleet.scheduler_ready(ready.peer, ready.ready):
                    self.models.register(self.fleet.schedulers[ready.peer])
            case Role.DETOKENIZER:
                self.fleet.detokenizer_ready(ready.peer)
        self._recovery.retry(self._now())

    def _on_down(self, peer: str) -> None:
        self.fleet.remove(peer)
        self.models.forget(peer)
        self._recovery.peer_down(peer, list(self._states.values()), self._now())

    async def _load(self, source: str, message: TokenizerFiles, frames: Sequence[memoryview]) -> None:
        await self.models.load(source, message, frames)
        if scheduler := self.fleet.schedulers.get(source):
            self.models.register(scheduler)

    # Background.

    async def _retry_forever(self) -> None:
        for tick in itertools.count(1):
            await asyncio.sleep(_RETRY_INTERVAL)
            self._recovery.retry(self._now())
            if tick % _TICKS_TO_ASK_AGAIN == 0:
                for peer in self.fleet.schedulers.keys() - self.models.peers:
                    self._outbox.send(peer, TokenizerFilesReq(id=str(tick)))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def sampling(request: GenerateRequest, model: ServedModel, prompt_tokens: int) -> SamplingParams:
    """Complete and check a request's sampling now that its prompt's length is known. Raises BadRequestError."""
    params, limits = request.sampling, model.limits
    context = model.context
    room = context - prompt_tokens
    if prompt_tokens == 0:
        raise BadRequestError("The prompt has no tokens.", param="prompt")
    wanted = request.max_tokens
    if wanted is None:
        wanted = max(min(room, request.default_tokens or room), 1)
    if wanted > room:
        raise ContextLengthExceededError(
            f"This model's maximum context length is {context} tokens. However, you requested {prompt_tokens + wanted} "
            f"tokens ({prompt_tokens} in the prompt, {wanted} in the completion).",
            param=request.max_tokens_param if prompt_tokens < context else "messages",
        )
    if params.min_new_tokens > wanted:
        raise BadRequestError("min_tokens is greater than the tokens to generate.", param="min_tokens")
    for param, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < limits.vocab_size:
                raise BadRequestError(f"{token_id} is not a token id of this model.", param=param)
    seed = request.seed if request.seed is not None else secrets.randbits(64)
    return msgspec.structs.replace(params, max_new_tokens=wanted, seed=seed & (2**64 - 1))
