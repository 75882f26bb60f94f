"""Handler of all messages that peers send to a frontend."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import assert_never, cast

from tercet.frontend.errors import from_rejection
from tercet.frontend.manager.encoder_answers import EncoderAnswers
from tercet.frontend.manager.peer_metrics import PeerMetrics
from tercet.frontend.manager.req_state import ACCEPTED, OutputRow, ReqState, Verdict, unpack_rows
from tercet.frontend.manager.request_table import RequestTable
from tercet.frontend.manager.status_feed import StatusFeed
from tercet.frontend.model.served_model import context_of
from tercet.frontend.routing.control import Control
from tercet.frontend.routing.dispatcher import Cause
from tercet.frontend.routing.model_registry import ModelRegistry
from tercet.frontend.routing.peers import SchedulerPeer
from tercet.frontend.routing.reconciliation import Reconciler
from tercet.protocol.membership.events import Delivery, PeerDown, PeerEvent, PeerReady, PeerUp
from tercet.protocol.messages.encodings import EncodedMedia
from tercet.protocol.messages.full_inbox import FullFrontendInbox
from tercet.protocol.messages.messages import (
    BatchEmbeddingOutput,
    BatchStrOutput,
    ControlReply,
    ExclusiveReady,
    Goodbye,
    Heartbeat,
    Hello,
    InternalState,
    Introduce,
    MetricsReq,
    Progress,
    Ready,
    Rejected,
    Series,
    TokenizerFiles,
    TokenizerFilesReq,
)
from tercet.protocol.messages.values import Role
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)

Incoming = FullFrontendInbox | PeerEvent
"""The node of a frontend decodes no other types."""


class MessageHandler:
    """Handler of deliveries, on the event loop's thread. Calls `on_peers_changed` if other peers are usable."""

    def __init__(
        self,
        outbox: Sender,
        models: ModelRegistry,
        requests: RequestTable,
        control: Control,
        peer_metrics: PeerMetrics,
        status: StatusFeed,
        on_peers_changed: Callable[[], None],
    ) -> None:
        self._outbox = outbox
        self._models = models
        self._states = requests.states
        self._counters = requests.counters
        self._clock = requests.clock
        self._dispatcher = requests.dispatcher
        self._fleet = requests.dispatcher.peers
        self._reconciler = Reconciler()
        self._encoder_answers = EncoderAnswers(requests)
        self._control = control
        self._peer_metrics = peer_metrics
        self._status = status
        self._on_peers_changed = on_peers_changed
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Cancel the loading of tokenizer files."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def handle(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._handle(delivery.source, cast("Incoming", delivery.message), delivery.frames)

    def request_files(self) -> None:
        """Ask schedulers again for tokenizer files that have not arrived."""
        for scheduler in self._fleet.schedulers.values():
            if scheduler.peer not in self._models.peers:
                self._outbox.send(scheduler.peer, TokenizerFilesReq(id=scheduler.incarnation))

    def _handle(self, source: str, message: Incoming, frames: tuple[memoryview, ...]) -> None:
        match message:
            case BatchStrOutput():
                self._on_text(source, message)
            case BatchEmbeddingOutput() | EncodedMedia():
                self._encoder_answers.handle(source, message, frames)
            case Heartbeat():
                self._on_heartbeat(source, message)
            case Rejected():
                self._on_rejected(source, message)
            case ExclusiveReady():
                self._on_exclusive_ready(source, message)
            case TokenizerFiles():
                self._spawn(self._load(source, message, frames))
            case PeerUp() | PeerReady() | PeerDown():
                self._on_peer(message)
            case InternalState():
                self._status.on_state(source, message)
            case ControlReply():
                self._control.on_reply(source, message)
            case MetricsReq() | Series():
                self._peer_metrics.on_message(source, message)
            case Hello() | Introduce() | Ready() | Progress() | Goodbye():
                logger.debug(
                    "%s: ignored a membership message, the node handles it type=%s", source, type(message).__name__
                )
            case _:
                assert_never(message)

    # Requests.

    def _on_text(self, source: str, batch: BatchStrOutput) -> None:
        try:
            rows = list(unpack_rows(batch))
        except ValueError as error:
            logger.error("%s: invalid batch of text, dropping it: %s", source, error)
            return
        now = self._clock()
        for rid, row in rows:
            state = self._states.get(rid)
            if isinstance(state, ReqState):
                self._on_row(state, row, now)

    def _on_row(self, state: ReqState, row: OutputRow, now: float) -> None:
        verdict = state.accept(row)
        if verdict is ACCEPTED:
            self._counters.models[state.model.base].observe_row(state, row, now)
            if (scheduler := self._fleet.schedulers.get(state.scheduler)) is not None and scheduler.identity:
                state.choices[row.index].weights = scheduler.identity.weights
            if state.exclusive:
                self._dispatcher.retry(now)  # dispatch the next exclusive request
            if row.finish is not None and isinstance(row.finish.matched, str):
                self._dispatcher.abort(state, [row.index], "stop string")
        elif verdict is Verdict.GAP:
            logger.warning(
                "%s: tokens are missing, redispatching rid=%s position=%d", state.scheduler, state.rid, row.position
            )
            self._dispatcher.redispatch(state, now, Cause.GAP)
        elif verdict is Verdict.ABORTED:
            self._dispatcher.redispatch(state, now, Cause.ABORTED)

    def _on_exclusive_ready(self, source: str, message: ExclusiveReady) -> None:
        state = self._states.get(message.rid)
        if state is not None and not state.done and (state.attempt, state.scheduler) == (message.attempt, source):
            self._dispatcher.grant_exclusive(state, self._clock())

    def _on_rejected(self, source: str, message: Rejected) -> None:
        state = self._states.get(message.rid)
        if state is None or state.attempt != message.attempt or state.scheduler != source:
            return
        state.scheduler, state.offered_by, state.refused = "", "", True
        self._dispatcher.release_load(state)
        scheduler = self._fleet.schedulers.get(source)
        if message.code == "draining" and scheduler is not None:
            scheduler.leaving = True  # its heartbeat will confirm this
        else:
            state.refused_by.add(source)
        elsewhere = any(each.peer not in state.refused_by for each in self._fleet.able_schedulers(state))
        # Waiting does not bring back adapter files that are gone.
        passes = message.code == "draining" or (state.output_tokens > 0 and message.code != "invalid_lora")
        if message.retry and elsewhere:
            self._dispatcher.redispatch(state, self._clock(), Cause.REFUSED)
        elif message.retry and passes:
            now = self._clock()
            state.lost(Cause.REFUSED, now)
            self._dispatcher.enqueue(state, now)
        else:
            limits = scheduler.limits if scheduler is not None and scheduler.limits is not None else state.model.limits
            state.fail(
                from_rejection(message.code, message.message, state.error_param(message.code, context_of(limits)))
            )

    # Peers.

    def _on_peer(self, event: PeerEvent) -> None:
        match event:
            case PeerUp():
                self._on_up(event)
            case PeerReady():
                self._on_ready(event)
            case PeerDown():
                self._on_down(event.peer, event.reason)
            case _:
                assert_never(event)

    def _on_heartbeat(self, source: str, heartbeat: Heartbeat) -> None:
        part = self._fleet.get(source)
        if part is None:
            return
        now, was_stuck = self._clock(), part.stuck
        self._fleet.heartbeat(source, heartbeat)
        is_scheduler = isinstance(part, SchedulerPeer)
        if part.stuck and not was_stuck:
            logger.error("%s: stuck, redispatching its requests step_age=%.0fs", source, heartbeat.step_age)
            self._redispatch_lost(
                source, is_scheduler, Cause.SCHEDULER_STUCK if is_scheduler else Cause.DETOKENIZER_STUCK
            )
            self._on_peers_changed()
        elif part.leaving:
            self._dispatcher.on_draining(source, self._states.values(), now)
            self._on_peers_changed()
        if not part.stuck:
            self._reconcile(source, is_scheduler, heartbeat, now)

    def _reconcile(self, source: str, is_scheduler: bool, heartbeat: Heartbeat, now: float) -> None:
        compare = self._reconciler.scheduler if is_scheduler else self._reconciler.detokenizer
        try:
            findings = compare(source, heartbeat, self._states, now)
        except ValueError as error:
            logger.error("%s: invalid heartbeat, ignoring its list of requests: %s", source, error)
            return
        for state, cause in findings.lost:
            logger.warning("%s: request lost, redispatching rid=%s cause=%s", source, state.rid, cause)
            self._dispatcher.redispatch(state, now, cause)
        for abort in findings.orphans:
            self._dispatcher.send_abort(source, abort)

    def _on_up(self, up: PeerUp) -> None:
        known = self._fleet.get(up.peer)
        if known is not None and known.incarnation != up.incarnation:
            self._on_down(up.peer, "another incarnation came up")
        if self._fleet.add(up.peer, up.role, up.incarnation) and up.role is Role.SCHEDULER:
            self._outbox.send(up.peer, TokenizerFilesReq(id=up.incarnation))
            self._models.update(self._fleet.schedulers.values(), self._fleet.weight_lineage)

    def _on_ready(self, ready: PeerReady) -> None:
        match ready.role:
            case Role.SCHEDULER:
                if self._fleet.scheduler_ready(ready.peer, ready.ready):
                    self._models.update(self._fleet.schedulers.values(), self._fleet.weight_lineage)
            case Role.DETOKENIZER:
                self._fleet.detokenizer_ready(ready.peer)
        self._dispatcher.retry(self._clock())
        self._on_peers_changed()

    def _on_down(self, peer: str, reason: str) -> None:
        """Remove a peer. It counts as dead unless it was draining or its goodbye says that it was stopped."""
        self._peer_metrics.on_peer_down(peer)
        part = self._fleet.remove(peer)
        if part is None:
            return
        self._reconciler.forget(peer)
        left = part.leaving or reason.startswith(("goodbye: stopped", "goodbye: stopping"))
        is_scheduler = isinstance(part, SchedulerPeer)
        if is_scheduler:
            cause = Cause.SCHEDULER_LEFT if left else Cause.SCHEDULER_DIED
            self._models.forget(peer)
            self._models.update(self._fleet.schedulers.values(), self._fleet.weight_lineage)
            self._dispatcher.forget_cache(peer)
            self._control.on_peer_down(peer)
        else:
            cause = Cause.DETOKENIZER_LEFT if left else Cause.DETOKENIZER_DIED
        if not left:
            self._counters.deaths[Role.SCHEDULER if is_scheduler else Role.DETOKENIZER] += 1
        self._redispatch_lost(peer, is_scheduler, cause)
        self._on_peers_changed()

    def _redispatch_lost(self, peer: str, is_scheduler: bool, cause: Cause) -> None:
        lost = self._dispatcher.on_scheduler_lost if is_scheduler else self._dispatcher.on_detokenizer_lost
        lost(peer, list(self._states.values()), self._clock(), cause)

    # Files.

    async def _load(self, source: str, message: TokenizerFiles, frames: Sequence[memoryview]) -> None:
        await self._models.load(source, message, frames)
        self._models.update(self._fleet.schedulers.values(), self._fleet.weight_lineage)
        self._dispatcher.retry(self._clock())
        self._on_peers_changed()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
