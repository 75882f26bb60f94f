"""The scheduler's main loop, which connects the pure core, the executor and the sockets."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tercet.protocol.backlog import BacklogSender, Outgoing, Send
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    FlushCacheReq,
    GetInternalStateReq,
    LoadLoRAAdapterReq,
    Message,
    PauseGenerationReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.profiles import ProfileReq
from tercet.protocol.messages.values import Grammar, LoRAAdapter, Phase
from tercet.protocol.messages.weight_transfers import WeightTransferReq
from tercet.protocol.node import Delivery, PeerDown, PeerEvent, PeerUp
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.core.events import (
    AdapterPending,
    AdapterRead,
    Arrival,
    Drain,
    GrammarPending,
    GrammarRead,
    MaskReady,
    PeerBlocked,
    PeerDrained,
    PeerGone,
    WeightsRead,
)
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.ports import Core, LateMasks, LoadedAdapter, Pending, Runner
from tercet.scheduler.status import StatusBoard
from tercet.scheduler.weight_transfer.weight_transfers import WeightTransfers

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL = 0.2
"""Seconds between two reports of load and held requests; heartbeats repeat the last report."""
RETRY_INTERVAL = 0.005
"""Seconds an idle loop waits before it retries a blocked peer's backlog or polls its loaders."""
BACKLOG_TIMEOUT = 30.0
"""Seconds without an accepted message after which a peer's backlog is dropped: it never connected, or does not read."""
MAX_BACKLOG = 20_000
"""Limit of messages kept for one peer. Only a peer that sends requests and never reads gets there; more are dropped."""

PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")

Receive = Callable[[float | None], list[Delivery]]
"""Returns all deliveries, after waiting at most that many seconds for the first (None: no limit)."""


class SchedulerLoop(Generic[PlanT, ResultT]):
    """The main loop. `overlap` is the number of steps that may be in flight while the next one is planned."""

    def __init__(
        self,
        core: Core[PlanT, ResultT],
        executor: Runner[PlanT, ResultT],
        drain: Receive,
        send: Send,
        board: StatusBoard,
        clock: Callable[[], float],
        *,
        overlap: int = 0,
        grammars: AsyncLoader[Grammar, object] | None = None,
        late_masks: LateMasks | None = None,
        adapters: AsyncLoader[LoRAAdapter, LoadedAdapter] | None = None,
        weights: AsyncLoader[str, None] | None = None,
        transfers: WeightTransfers | None = None,
        profile: Callable[[ProfileReq], ControlReply] | None = None,
        prepare: Callable[[], bool] = lambda: False,
        on_weights_loaded: Callable[[str], None] = lambda _: None,
        on_turn: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the loop.

        `prepare` does part of the work that makes later steps faster; it returns whether more is left.
        `on_weights_loaded` is called with the directory of other weights that serve from now on, `on_turn` at the end
        of each turn.
        """
        self._core = core
        self._executor = executor
        self._drain = drain
        self.outbox = BacklogSender(send, MAX_BACKLOG, clock, patience=BACKLOG_TIMEOUT)
        self._board = board
        self._clock = clock
        self._overlap = overlap
        self._grammars = grammars
        self._late_masks = late_masks
        self._adapters = adapters
        self._weights = weights
        self._transfers = transfers
        self._profile = profile
        self._prepare = prepare
        self._on_weights_loaded = on_weights_loaded
        self._on_turn = on_turn
        self._in_flight: deque[tuple[PlanT, Pending[ResultT]]] = deque()
        self._published = float("-inf")
        self._stuck = False
        """The last turn could plan no step: waiting choices need memory that blocked requests hold."""
        self.draining = False
        """If set, the loop ends once no request is held; new requests are refused meanwhile."""
        self.stopping = False
        """If set, the loop ends after the current step."""

    def run(self) -> None:
        """Serve until stopped. A step's exception is not caught: the process dies, and its supervisor restarts it."""
        self._board.enter(Phase.IDLE)
        while not self.stopping and not (self.draining and self._core.empty and not self.outbox.backlog):
            self.turn()

    def turn(self) -> None:
        """Handle arrived messages, submit the next step, and commit the oldest one."""
        core, outbox, in_flight = self._core, self.outbox, self._in_flight
        changes = outbox.flush()
        events = [Arrival(peer, PeerBlocked(peer) if blocked else PeerDrained(peer)) for peer, blocked in changes]
        events += self._loaded()
        if self.draining and self._board.drain():
            events.append(Arrival("", Drain()))
        arrivals = [*events, *self._arrivals(0 if events else self._wait())]
        if arrivals:
            outbox.send(core.handle(*arrivals))
        if plan := core.schedule(self._clock()):
            self._board.begin_step()
            in_flight.append((plan, self._executor.submit(plan)))
        self._stuck = not plan and not in_flight
        if in_flight and (not plan or len(in_flight) > self._overlap):
            outbox.send(self._commit(*in_flight.popleft()))
            self._board.end_step(more=bool(in_flight))
        self._publish()
        self._on_turn()

    def _commit(self, plan: PlanT, pending: Pending[ResultT]) -> list[Outgoing]:
        """Commit a step, and announce the weights that it loaded before peers get the answers to the update."""
        result = pending.result()
        outgoing = self._core.commit(result)
        if isinstance(plan, Plan) and plan.weights and isinstance(result, StepResult) and not result.fault:
            self._on_weights_loaded(plan.weights)
        return outgoing

    def _wait(self) -> float | None:
        """Return the seconds to wait for a message: 0 while a step or some preparation can run."""
        if self._in_flight or (self._core.runnable and not self._stuck):
            return 0
        self._board.enter(Phase.IDLE)
        if self.outbox.backlog or self._core.runnable or self._loading:
            return RETRY_INTERVAL
        self._publish(now=True)
        self._board.enter(Phase.COMPILING)
        more = self._prepare()
        self._board.enter(Phase.IDLE)
        return 0 if more else None

    @property
    def _loading(self) -> bool:
        """Return whether something is being loaded, so that the loop must poll it."""
        loaders = (self._grammars, self._adapters, self._late_masks, self._weights, self._transfers)
        return any(each is not None and each.busy for each in loaders)

    def _loaded(self) -> list[Arrival]:
        """Return events for the grammars, adapters, masks and weights that became available since the last call."""
        events: list[Arrival] = []
        if self._grammars is not None and self._grammars.busy:
            events += [_grammar_read(self._grammars, each) for each in self._grammars.pop_loaded()]
        if self._adapters is not None and self._adapters.busy:
            events += [_adapter_read(self._adapters, each) for each in self._adapters.pop_loaded()]
        if self._late_masks is not None and self._late_masks.busy:
            events += [Arrival("", MaskReady(*each)) for each in self._late_masks.pop_ready()]
        if self._weights is not None and self._weights.busy:
            weights = self._weights
            events += [Arrival("", WeightsRead(each, weights.error_of(each))) for each in weights.pop_loaded()]
        if self._transfers is not None and self._transfers.busy:
            for source, outcome in self._transfers.pop_finished():
                if isinstance(outcome, ControlReply):
                    self.outbox.send([(source, outcome)])
                else:
                    events.append(self._check_weights(source, outcome))
        return events

    def _request(self, grammar: Grammar | None, adapter: LoRAAdapter | None) -> list[Arrival]:
        """Load what a message needs. Return events for the core: each is pending, or it is loaded."""
        events: list[Arrival] = []
        if grammar is not None and (grammars := self._grammars) is not None:
            loaded = grammars.request(grammar)
            events.append(_grammar_read(grammars, grammar) if loaded else Arrival("", GrammarPending(grammar)))
        if adapter is not None and (adapters := self._adapters) is not None:
            loaded = adapters.request(adapter)
            events.append(_adapter_read(adapters, adapter) if loaded else Arrival("", AdapterPending(adapter)))
        return events

    def _check_weights(self, source: str, order: UpdateWeightsFromDiskReq) -> Arrival:
        if self._weights is not None:
            self._weights.request(order.path)
        return Arrival(source, order)

    def _handle_beside_core(self, source: str, message: Message | PeerEvent, frames: Sequence[Frame]) -> None:
        """Handle a message that is no event of the core. Membership messages have been handled by the node."""
        if isinstance(message, GetInternalStateReq):
            self.outbox.send([(source, self._core.internal_state(message.id, self._clock()))])
        elif isinstance(message, ProfileReq) and self._profile is not None:
            self.outbox.send([(source, self._profile(message))])
        elif isinstance(message, WeightTransferReq) and self._transfers is not None:
            self._transfers.request(source, message, frames)
        elif isinstance(message, WeightTransferReq):
            why = "an encoder keeps the weights that it was started with"
            self.outbox.send([(source, ControlReply(id=message.id, ok=False, message=why))])

    def _publish(self, *, now: bool = False) -> None:
        time = self._clock()
        if now or time - self._published >= PUBLISH_INTERVAL:
            self._published = time
            self._board.publish(self._core.load(), self._core.held())
            if self._grammars is not None:
                self._grammars.retain(self._core.grammars())
            if self._adapters is not None:
                self._adapters.retain(self._core.adapters())
            if self._weights is not None:
                self._weights.retain(())

    def _arrivals(self, wait: float | None) -> list[Arrival]:
        """Convert deliveries into arrivals for the core, and request the loading of grammars, adapters and weights."""
        arrivals = []
        for source, message, frames, at in self._drain(wait):
            match message:
                case TokenizedGenerateReqInput():
                    arrivals.append(Arrival(source, message, at))
                    arrivals += self._request(message.sampling.grammar, message.lora)
                case LoadLoRAAdapterReq(adapter=adapter):
                    arrivals += [Arrival(source, message), *self._request(None, adapter)]
                case UpdateWeightsFromDiskReq():
                    arrivals.append(self._check_weights(source, message))
                case UnloadLoRAAdapterReq(adapter=adapter):
                    if self._adapters is not None:
                        self._adapters.unload(adapter)
                    arrivals.append(Arrival(source, message))
                case (
                    TokenizedEmbeddingReqInput()
                    | AbortReq()
                    | FlushCacheReq()
                    | PauseGenerationReq()
                    | ContinueGenerationReq()
                    | ReleaseMemoryReq()
                    | ResumeMemoryReq()
                ):
                    arrivals.append(Arrival(source, message, at))
                case PeerDown(peer, _, reason):
                    logger.info("peer %s disconnected: reason=%s", peer, reason)
                    self.outbox.forget(peer)
                    arrivals.append(Arrival(peer, PeerGone(peer)))  # for every role: any peer may have sent requests
                case PeerUp(peer):
                    logger.info("peer %s connected", peer)
                case _:
                    self._handle_beside_core(source, message, frames)
        return arrivals


def _grammar_read(loader: AsyncLoader[Grammar, object], grammar: Grammar) -> Arrival:
    return Arrival("", GrammarRead(grammar, loader.error_of(grammar)))


def _adapter_read(loader: AsyncLoader[LoRAAdapter, LoadedAdapter], adapter: LoRAAdapter) -> Arrival:
    loaded = loader.value_of(adapter)
    return Arrival("", AdapterRead(adapter, loader.error_of(adapter), "" if loaded is None else loaded.sha256))
