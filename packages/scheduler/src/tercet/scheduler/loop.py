"""The scheduler's main loop, which connects the pure core, the executor and the sockets."""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tercet.protocol.backlog import BacklogSender, Outgoing, Send
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.encodings import EncodeMediaReq
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
from tercet.protocol.messages.values import Phase
from tercet.protocol.messages.weight_transfers import WeightTransferReq
from tercet.protocol.node import Delivery, PeerDown, PeerEvent, PeerUp
from tercet.scheduler.core.events import Arrival, Drain, MediaReceived, PeerBlocked, PeerDrained, PeerGone
from tercet.scheduler.core.plan import Plan, StepResult
from tercet.scheduler.loaders import Loaders
from tercet.scheduler.ports import Core, Pending, Runner
from tercet.scheduler.status import StatusBoard

logger = logging.getLogger(__name__)

PUBLISH_INTERVAL = 0.2
"""Seconds between two reports of load and held requests; heartbeats repeat the last report."""
RETRY_INTERVAL = 0.005
"""Seconds an idle loop waits before it retries a blocked peer's backlog or polls its loaders."""
BACKLOG_TIMEOUT = 30.0
"""Seconds without an accepted message after which a peer's backlog is dropped: it never connected, or does not read."""
MAX_BACKLOG = 20_000
"""Limit of messages kept for one peer. Only a peer that sends requests and never reads gets there; more are dropped."""

MOST_DELIVERIES = 128
"""Messages of a turn; further ones wait. Each takes up to 0.1 ms, and running choices wait for all of them."""

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
        loaders: Loaders | None = None,
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
        self._loaders = loaders or Loaders()
        self._profile = profile
        self._prepare = prepare
        self._on_weights_loaded = on_weights_loaded
        self._on_turn = on_turn
        self._inbox: deque[Delivery] = deque()
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
        while not (self.stopping or (self.draining and self._core.empty and not (self._inbox or self.outbox.backlog))):
            self.turn()

    def turn(self) -> None:
        """Handle arrived messages, submit the next step, and commit the oldest one."""
        core, outbox, in_flight = self._core, self.outbox, self._in_flight
        changes = outbox.flush()
        events = [Arrival(peer, PeerBlocked(peer) if blocked else PeerDrained(peer)) for peer, blocked in changes]
        loaded, answers = self._loaders.poll()
        outbox.send(answers)
        events += loaded
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
        if self._inbox or self._in_flight or (self._core.runnable and not self._stuck):
            return 0
        self._board.enter(Phase.IDLE)
        if self.outbox.backlog or self._core.runnable or self._loaders.busy:
            return RETRY_INTERVAL
        self._publish(now=True)
        self._board.enter(Phase.COMPILING)
        more = self._prepare()
        self._board.enter(Phase.IDLE)
        return 0 if more else None

    def _handle_beside_core(self, source: str, message: Message | PeerEvent, frames: Sequence[Frame]) -> None:
        """Handle a message that is no event of the core. Membership messages have been handled by the node."""
        if isinstance(message, GetInternalStateReq):
            self.outbox.send([(source, self._core.internal_state(message.id, self._clock()))])
        elif isinstance(message, ProfileReq) and self._profile is not None:
            self.outbox.send([(source, self._profile(message))])
        elif isinstance(message, WeightTransferReq):
            self.outbox.send(self._loaders.transfer(source, message, frames))

    def _publish(self, *, now: bool = False) -> None:
        time = self._clock()
        if now or time - self._published >= PUBLISH_INTERVAL:
            self._published = time
            self._board.publish(self._core.load(), self._core.held())
            self._loaders.retain(self._core)

    def _arrivals(self, wait: float | None) -> list[Arrival]:
        """Convert deliveries into arrivals for the core, and load what the messages need."""
        arrivals = []
        self._inbox += self._drain(wait)
        taken = [self._inbox.popleft() for _ in range(min(MOST_DELIVERIES, len(self._inbox)))]
        for source, message, frames, at in taken:
            match message:
                case TokenizedGenerateReqInput():
                    if refused := self._loaders.keep_media(message, frames):
                        self.outbox.send([(source, refused)])
                        continue
                    arrivals.append(Arrival(source, message, at))
                    arrivals += self._loaders.load(message.sampling.grammar, message.lora)
                case EncodeMediaReq():
                    arrivals.append(Arrival(source, MediaReceived(message, frames), at))
                case LoadLoRAAdapterReq(adapter=adapter):
                    arrivals += [Arrival(source, message), *self._loaders.load(None, adapter)]
                case UpdateWeightsFromDiskReq():
                    arrivals.append(self._loaders.update(source, message))
                case UnloadLoRAAdapterReq(adapter=adapter):
                    self._loaders.unload(adapter)
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
