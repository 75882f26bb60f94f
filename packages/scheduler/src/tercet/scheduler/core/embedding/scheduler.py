"""Deterministic scheduling core of an encoder: inputs in, plans out, results in, vectors out.

It is the counterpart of `Scheduler` for inputs of text, or of images and sounds, and simpler: an input is computed
whole, in one step, and leaves no state, so there are no slots, pages or prefixes. Attempts, aborts, drains, dead
frontends, full peers, pauses and exclusive inputs have the same meaning.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar, assert_never

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    ExclusiveReady,
    FlushCacheReq,
    InternalState,
    LoadLoRAAdapterReq,
    PauseGenerationReq,
    Rejected,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    UnloadLoRAAdapterReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Grammar,
    Held,
    Load,
    LoRAAdapter,
    belongs,
    pack_ints,
)
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.embedding.inputs import Answers, Inputs, Received
from tercet.scheduler.core.embedding.queue import EmbeddingQueue
from tercet.scheduler.core.embedding.req import EmbeddingReq
from tercet.scheduler.core.events import (
    AdapterPending,
    AdapterRead,
    Arrival,
    Drain,
    GrammarPending,
    GrammarRead,
    MaskReady,
    MediaReceived,
    PeerBlocked,
    PeerDrained,
    PeerGone,
    WeightsRead,
)
from tercet.scheduler.core.intake.pending_aborts import PendingAborts

PlanT = TypeVar("PlanT")
ResultT = TypeVar("ResultT")


class EmbeddingScheduler(Generic[PlanT, ResultT]):
    """Batches whole inputs under one token budget a step."""

    def __init__(self, config: CoreConfig, inputs: Inputs[PlanT, ResultT]) -> None:
        self.config = config
        self.inputs = inputs
        self.counters = CoreCounters()
        self.waiting = EmbeddingQueue(config.policy, config.max_skips)
        self.roster: dict[tuple[str, str], EmbeddingReq] = {}
        """Inputs by frontend and rid: the waiting ones, and those in flight whose answer is still needed."""
        self.in_flight: deque[tuple[int, list[EmbeddingReq]]] = deque()
        """The step and the inputs of each plan."""
        self.blocked_peers: set[str] = set()
        self.paused_by = ""
        """The frontend that paused generation. Any frontend's continue, or the end of this frontend, ends the pause."""
        self.draining = False
        self._asked = PendingAborts()
        self._arrivals = 0
        self._bytes = 0
        """Bytes of the arrays of held inputs."""

    @property
    def runnable(self) -> bool:
        """Return whether `schedule` might have a plan."""
        return not self.paused_by and any(req.frontend not in self.blocked_peers for req in self.waiting)

    @property
    def empty(self) -> bool:
        """Return whether no input is held."""
        return not self.roster

    def handle(self, *arrivals: Arrival) -> list[Outgoing]:
        """Handle messages. Return the answers that are known at once."""
        outputs = self.inputs.answers()
        for source, message, at in arrivals:
            if isinstance(message, ControlReq):
                self._handle_control(source, message, outputs)
                continue
            match message:
                case TokenizedEmbeddingReqInput() | MediaReceived() if isinstance(message, self.inputs.kind):
                    self._accept(source, message, outputs, at)
                case TokenizedGenerateReqInput() | TokenizedEmbeddingReqInput() | MediaReceived():
                    self._refuse(source, message, "invalid_request", self.inputs.refusal, outputs)
                case AbortReq():
                    self._abort(source, message, outputs)
                case PeerGone(peer):
                    self._drop_frontend(peer)
                case PeerBlocked(peer):
                    self.blocked_peers.add(peer)
                case PeerDrained(peer):
                    self.blocked_peers.discard(peer)
                case Drain():
                    self.draining = True
                case GrammarPending() | GrammarRead() | MaskReady() | AdapterPending() | AdapterRead() | WeightsRead():
                    pass  # an encoder has no grammars or adapters, and keeps its weights
                case _:
                    assert_never(message)
        self._offer_exclusive(outputs)
        return outputs.collect()

    def _handle_control(self, source: str, order: ControlReq, outputs: Answers) -> None:
        ok, reply = True, ""
        match order:
            case FlushCacheReq():
                reply = self.inputs.flush()
            case PauseGenerationReq() | ContinueGenerationReq():
                self.paused_by = source if isinstance(order, PauseGenerationReq) else ""
            case LoadLoRAAdapterReq() | UnloadLoRAAdapterReq():
                ok, reply = False, "an encoder runs no adapters"
            case UpdateWeightsFromDiskReq():
                ok, reply = False, "an encoder keeps the weights that it was started with"
            case ReleaseMemoryReq() | ResumeMemoryReq():
                ok, reply = False, "an encoder keeps its memory"
            case _:
                assert_never(order)
        outputs.send(source, ControlReply(id=order.id, ok=ok, message=reply))

    def schedule(self, now: float = 0.0) -> PlanT | None:
        """Plan the next step, if there is one: inputs in order, as many as the budget allows, but at least one.

        `now` changes no decision: it measures how long inputs have waited.
        """
        if self.paused_by or any(reqs[0].alone for _, reqs in self.in_flight):
            return None
        reqs: list[EmbeddingReq] = []
        budget = self.config.token_budget
        for req in self._line():
            if req.frontend in self.blocked_peers:
                continue
            if req.hold or (reqs and (req.alone or req.tokens > budget)):
                break
            if req.alone and self.in_flight:
                return None
            reqs.append(req)
            budget -= req.tokens
            if req.alone or budget <= 0 or len(reqs) == self.inputs.most_rows:
                break
        if not reqs:
            return None
        self.waiting.take(reqs)
        for req in reqs:
            req.waited = now - req.arrived
        step = self.counters.steps
        self.counters.steps += 1
        self.counters.prompt_tokens += sum(req.tokens for req in reqs)
        self.in_flight.append((step, reqs))
        return self.inputs.plan(step, reqs)

    def commit(self, result: ResultT) -> list[Outgoing]:
        """Apply the result of the oldest plan in flight. Return its vectors."""
        step, reqs = self.in_flight.popleft()
        results = self.inputs.results(result, step, reqs)
        outputs, kept = self.inputs.answers(), False
        for req, answer in zip(reqs, results, strict=True):
            kept |= isinstance(answer, bytes) and self.inputs.keep(req, answer)
            if self.roster.get((req.frontend, req.rid)) is not req:
                continue
            self._forget(req)
            self._finish(req, answer, outputs)
        if kept:
            self._answer_known(outputs)
        self._offer_exclusive(outputs)
        return outputs.collect()

    def _finish(self, req: EmbeddingReq, answer: bytes | FinishReason, outputs: Answers) -> None:
        """Send an input's answer. The input is not held any more."""
        self.counters.finished += 1
        if isinstance(answer, FinishReason):
            outputs.fail(req, answer)
        else:
            outputs.emit(req, answer)

    def _answer_known(self, outputs: Answers) -> None:
        """Answer waiting inputs that equal one of the last step."""
        for req in list(self.waiting):
            if (known := self.inputs.known(req)) is not None:
                self._forget(req)
                self._finish(req, known, outputs)

    def _offer_exclusive(self, outputs: Answers) -> None:
        """Offer exclusive use to the next input, if it is held for that and no other runs."""
        if self.in_flight:
            return
        req = next((req for req in self._line() if req.frontend not in self.blocked_peers), None)
        if req is not None and req.hold and not req.offered:
            req.offered = True
            outputs.send(req.frontend, ExclusiveReady(rid=req.rid, attempt=req.attempt))

    def _line(self) -> Iterable[EmbeddingReq]:
        """Return the waiting inputs in order. An unblocked input that was offered exclusive use is returned alone."""
        offered = [req for req in self.waiting if req.offered and req.frontend not in self.blocked_peers]
        return offered or self.waiting.in_order()

    def held(self) -> dict[str, Held]:
        """Return the inputs that this scheduler holds for each frontend, for its heartbeats."""
        by_frontend: dict[str, list[EmbeddingReq]] = {}
        for req in self.roster.values():
            by_frontend.setdefault(req.frontend, []).append(req)
        return {
            frontend: Held(
                rids=[req.rid for req in reqs],
                indices=bytes(4 * len(reqs)),
                attempts=pack_ints(req.attempt for req in reqs),
                positions=bytes(4 * len(reqs)),
            )
            for frontend, reqs in by_frontend.items()
        }

    def grammars(self) -> set[Grammar]:
        return set()

    def adapters(self) -> set[LoRAAdapter]:
        return set()

    def media(self) -> set[bytes]:
        return set()

    def load(self) -> Load:
        """Return the load that heartbeats report."""
        running = [req for _, reqs in self.in_flight for req in reqs]
        return Load(
            queued=len(self.waiting),
            running=len(running),
            queued_tokens=sum(req.tokens for req in self.waiting),
            running_tokens=sum(req.tokens for req in running),
            prompt_tokens=self.counters.prompt_tokens,
        )

    def internal_state(self, number: str, now: float) -> InternalState:  # noqa: ARG002
        """Return the reply to a GetInternalStateReq. Inputs take one step each, so they are not described."""
        return InternalState(id=number, load=self.load())

    def _accept(self, source: str, request: Received, outputs: Answers, at: float) -> None:
        """Queue an input. A higher attempt of a held one replaces it; an equal or lower attempt is ignored."""
        held = self.roster.get((source, request.rid))
        if held is not None and held.attempt >= request.attempt:
            self.counters.ignored += 1
            return
        fault = self.inputs.fault(request)
        req = self.inputs.req(request, source, self._arrivals, at)
        if held is not None and not self.draining and fault is None and held.content == req.content:
            held.route(req.request)
            return
        if held is not None:
            self._forget(held)
        if self.draining:
            self._refuse(source, request, "draining", "this scheduler is leaving", outputs, retry=True)
        elif fault is not None:
            self._refuse(source, request, *fault, outputs)
        elif (known := self.inputs.known(req)) is not None:
            self._finish(req, known, outputs)
        elif request.attempt == 0 and self.waiting.room(req.tenant, self.config.max_queued) < 1:
            self._refuse(source, request, "overloaded", "too many inputs are waiting", outputs, retry=True)
        elif req.array and self._bytes + req.array.nbytes > self.inputs.most_bytes:
            self._refuse(source, request, "overloaded", "too many arrays are held", outputs, retry=True)
        else:
            self._arrivals += 1
            if finish := self._asked.finish(request.rid):
                outputs.fail(req, finish)
                return
            self.roster[source, request.rid] = req
            self._bytes += req.array.nbytes
            self.waiting.add(req)

    def _refuse(
        self,
        source: str,
        request: Received | TokenizedGenerateReqInput,
        code: str,
        why: str,
        outputs: Answers,
        *,
        retry: bool = False,
    ) -> None:
        self.counters.rejected += 1
        answer = Rejected(rid=request.rid, attempt=request.attempt, code=code, message=why, retry=retry)
        outputs.send(source, answer)

    def _abort(self, source: str, message: AbortReq, outputs: Answers) -> None:
        """End the named input of this frontend; an abort by a user ends the inputs of every frontend."""
        if message.indices and 0 not in message.indices:
            return
        self._asked.note(message)
        own = self.roster.get((source, message.rid))
        named = [own] if own is not None else []
        if message.user_requested:
            named = [req for req in self.roster.values() if _is_named(req.rid, message.rid)]
        for req in named:
            self.counters.aborted += 1
            self._forget(req)
            outputs.fail(
                req, FinishReason(FinishType.ABORT, message=message.reason, user_requested=message.user_requested)
            )

    def _drop_frontend(self, peer: str) -> None:
        for req in [req for req in self.roster.values() if req.frontend == peer]:
            self.counters.aborted += 1
            self._forget(req)
        if self.paused_by == peer:
            self.paused_by = ""

    def _forget(self, req: EmbeddingReq) -> None:
        """Remove an input. A plan in flight that names it still runs, but its result is dropped."""
        del self.roster[req.frontend, req.rid]
        self._bytes -= req.array.nbytes
        self.waiting.remove(req)


def _is_named(rid: str, name: str) -> bool:
    """Return whether a user's abort names this rid: itself, its siblings `name.N`, or all for ""."""
    return not name or belongs(rid, name)
