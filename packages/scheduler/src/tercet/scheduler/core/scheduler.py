"""Deterministic scheduling core: messages in, plans out, results in, messages out.

It uses no clock, randomness, socket or tensor: the same calls give the same plans, which `tools/replay.py` proves from
an event log. `schedule` may be called again before the last plan's result is committed (`overlap`).
"""

from collections import deque
from typing import assert_never

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
    MemoryReq,
    PauseGenerationReq,
    Rejected,
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
    pack_ints,
    unpack_ints,
)
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.control import AdapterLoadRequests, MemoryOccupation, WeightUpdate
from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.events import (
    AdapterRead,
    Arrival,
    Drain,
    GrammarRead,
    MediaReceived,
    Obstacle,
    PeerGone,
    WeightsRead,
)
from tercet.scheduler.core.intake.admission import RequestIntake
from tercet.scheduler.core.intake.validation import invalid_ids
from tercet.scheduler.core.memory import KVMemory
from tercet.scheduler.core.outputs import FastPathRows, Outputs
from tercet.scheduler.core.plan import Capacity, Plan, Row, StepResult
from tercet.scheduler.core.planner import Planner
from tercet.scheduler.core.request import Req, finish_after
from tercet.scheduler.core.request_table import RequestTable
from tercet.scheduler.core.speculation.verification import DraftVerifier
from tercet.scheduler.core.waiting.policy import POLICIES
from tercet.scheduler.core.waiting.queue import WaitingQueue


class Scheduler:
    """Continuous batching over one executor."""

    def __init__(self, config: CoreConfig, capacity: Capacity) -> None:
        self.config = config
        self.capacity = capacity
        self.counters = CoreCounters()
        self.memory = KVMemory(capacity, config)
        self.policy = POLICIES[config.policy]()
        self.waiting = WaitingQueue(self.policy, config.max_skips)
        self.planner = Planner(config, self.memory, self.waiting, self.counters)
        self.roster = RequestTable(self.memory, self.policy, self.waiting, self.planner, self.counters)
        self.intake = RequestIntake(
            capacity, self.memory.tokens, config.max_queued, self.waiting, self.roster, self.counters
        )
        self.in_flight: deque[tuple[Plan, list[Req]]] = deque()
        self.paused_by = ""
        """The frontend that paused generation. Any frontend's continue, or the end of this frontend, ends the pause."""
        self.orders = AdapterLoadRequests()
        self.weights = WeightUpdate()
        self.occupation = MemoryOccupation()
        self.steps = 0
        self._fast_path = FastPathRows()

    @property
    def paused(self) -> bool:
        """Return whether generation is paused, or has no memory."""
        return bool(self.paused_by or self.occupation.released)

    @property
    def runnable(self) -> bool:
        """Return whether `schedule` might have a plan."""
        if self.loads_weights or self.occupation.due:
            return True
        if self.paused:
            return False
        blocked = self.planner.is_blocked
        return any(req.has_work and not blocked(req) for req in self.planner.running) or any(
            not blocked(req) for req in self.waiting
        )

    @property
    def empty(self) -> bool:
        """Return whether no request is held."""
        return not any(True for _ in self.roster)

    def handle(self, *arrivals: Arrival) -> list[Outgoing]:
        """Handle messages. Return the answers that are known at once."""
        outputs = Outputs()
        for source, message, at in arrivals:
            if isinstance(message, ControlReq):
                self._handle_control(source, message, outputs)
                continue
            if isinstance(message, Obstacle):
                self._apply_availability(message, outputs)
                continue
            match message:
                case TokenizedGenerateReqInput():
                    self.intake.accept(source, message, outputs, at)
                case TokenizedEmbeddingReqInput(rid=rid, attempt=attempt) | MediaReceived(rid=rid, attempt=attempt):
                    why = "this scheduler generates text, and makes no vectors or embeddings"
                    outputs.send(source, Rejected(rid=rid, attempt=attempt, code="invalid_request", message=why))
                case AbortReq():
                    self.intake.abort(source, message, outputs)
                case PeerGone():
                    self.intake.drop_frontend(message.peer)
                    self.orders.drop_frontend(message.peer)
                    if self.paused_by == message.peer:
                        self.paused_by = ""
                case WeightsRead():
                    self.weights.read(message, outputs)
                    self.planner.closed = bool(self.weights.due)
                case Drain():
                    self.intake.draining = True
                case _:
                    assert_never(message)
        self._offer_exclusive(outputs)
        return outputs.collect()

    def _handle_control(self, source: str, order: ControlReq, outputs: Outputs) -> None:
        if isinstance(order, LoadLoRAAdapterReq) and self.capacity.adapters:
            self.orders.note(source, order)
            return
        if isinstance(order, UpdateWeightsFromDiskReq):
            self.weights.note(source, order, outputs)
            return
        if isinstance(order, MemoryReq):
            self.occupation.note(source, order)
            return
        ok, reply = True, ""
        match order:
            case FlushCacheReq():
                reply = f"{self.memory.flush()} pages freed"
            case PauseGenerationReq() | ContinueGenerationReq():
                self.paused_by = source if isinstance(order, PauseGenerationReq) else ""
            case LoadLoRAAdapterReq() | UnloadLoRAAdapterReq():
                ok = bool(self.capacity.adapters)
                reply = "" if ok else "this scheduler runs no adapters"
            case _:
                assert_never(order)
        outputs.send(source, ControlReply(id=order.id, ok=ok, message=reply))

    def _apply_availability(self, message: Obstacle, outputs: Outputs) -> None:
        self.planner.apply_availability(message)
        if isinstance(message, GrammarRead) and message.fault:
            self.intake.refuse(message.grammar, message.fault, outputs)
        if isinstance(message, AdapterRead):
            self.orders.answer(message, outputs)
            if message.fault:
                self.intake.refuse_adapter(message.adapter, message.fault, outputs)

    def schedule(self, now: float = 0.0, *, weights: bool = True) -> Plan | None:
        """Plan the next step, if there is one; load no weights unless `weights`. `now` measures waiting and steps."""
        planned: tuple[Plan, list[Req]] | None = None
        if weights and self.loads_weights:
            self._retract_all()
            self.planner.closed = False
            planned = Plan(step=self.steps, weights=self.weights.load(), rows=[]), []
        elif self.occupation.due:
            if self.in_flight:
                return None
            self._retract_all()
            planned = Plan(step=self.steps, released=self.occupation.plan(), rows=[]), []
        elif not self.paused:
            self.planner.stages.begin(len(self.in_flight))
            planned = self.planner.plan(self.steps, now)
        if planned is None:
            return None
        self.steps += 1
        self.in_flight.append(planned)
        return planned[0]

    @property
    def loads_weights(self) -> bool:
        """Return whether other weights are due, and no choice needs the present ones.

        While generation is paused, that is as soon as no step is in flight.
        """
        if not self.weights.due or self.in_flight:
            return False
        return self.paused or not any(req.slot >= 0 or req.output_tokens for req in self.roster)

    def _retract_all(self) -> None:
        """Retract running choices, to be recomputed, and drop cached prefixes, and all that has a place."""
        for req in list(self.planner.running):
            self.planner.retract(req)
        self.memory.forget()

    def commit(self, result: StepResult) -> list[Outgoing]:
        """Apply the result of the oldest plan in flight. Return its tokens and final answers."""
        plan, reqs = self.in_flight.popleft()
        if result.step != plan.step or len(result.token_ids) != len(plan.rows):
            raise ValueError(f"result of step {result.step} does not answer plan {plan.step}")
        outputs = Outputs()
        vocab_size, special = self.capacity.vocab_size, _special(result)
        drafts = DraftVerifier(plan.draft_tokens, reqs)
        special |= drafts.rows
        fast_path: list[Req] = []
        fast_path_tokens: list[int] = []
        for index, (req, token) in enumerate(zip(reqs, result.token_ids, strict=True)):
            req.in_flight -= 1
            if req.fast_path and 0 <= token < vocab_size and index not in special:
                tokens = req.tokens
                tokens.append(token)
                may_end = token in req.stop_ids or len(tokens) >= req.end  # rare: cheaper than calling `finish_after`
                if may_end and (finish := finish_after(req, token)):
                    self.counters.output_tokens += 1
                    self.roster.end(req, finish, outputs)
                else:
                    fast_path.append(req)
                    fast_path_tokens.append(token)
            elif req.finish is None:
                if drafts.holds(index, plan.rows[index], req):
                    self._apply_row(result, index, plan.rows[index], req, outputs)
            else:
                self._drop_row(result, index, plan.rows[index], req)
        for req in self.planner.encodings.commit(result):
            self.roster.free(req)
        self.counters.output_tokens += len(fast_path)
        self._fast_path.update(fast_path)
        outputs.emit_fast_path(self._fast_path, fast_path_tokens)
        self.counters.accepted_tokens += drafts.learn()
        self.policy.advanced(reqs)
        self.memory.on_step_committed(plan, reqs)
        if plan.weights:
            self.weights.loaded(outputs, result.fault)
            if not result.fault:
                self.occupation.weights_loaded()
        if plan.released is not None:
            self.occupation.changed(outputs, result.fault)
        self._offer_exclusive(outputs)
        return outputs.collect()

    def held(self) -> dict[str, Held]:
        """Return the requests that this scheduler holds for each frontend, for its heartbeats."""
        by_frontend: dict[str, list[Req]] = {}
        for req in self.roster:
            if req.finish is None:
                by_frontend.setdefault(req.frontend, []).append(req)
        return {
            frontend: Held(
                rids=[req.rid for req in reqs],
                indices=pack_ints(req.index for req in reqs),
                attempts=pack_ints(req.attempt for req in reqs),
                positions=pack_ints(req.sent for req in reqs),
            )
            for frontend, reqs in by_frontend.items()
        }

    def grammars(self) -> set[Grammar]:
        """Return the grammars of held choices."""
        return {req.sampling.grammar for req in self.roster if req.sampling.grammar is not None}

    def adapters(self) -> set[LoRAAdapter]:
        """Return the adapters of held choices and of load requests."""
        return {*self.orders, *(req.adapter for req in self.roster if req.adapter is not None)}

    def media(self) -> set[bytes]:
        """Return the hashes of the images and audio clips of held choices."""
        images = {each.sha256 for req in self.roster if req.images is not None for each in req.images.inputs}
        return images | {req.audio.sha256 for req in self.roster if req.audio is not None}

    def load(self) -> Load:
        """Return the load that heartbeats report."""
        running = self.planner.running
        return Load(
            queued=self.roster.queued,
            running=len(running),
            queued_tokens=sum(len(req.tokens) for req in self.waiting),
            running_tokens=sum(len(req.tokens) for req in running),
            pages_total=self.memory.pools.total,
            pages_free=self.memory.pools.free,
            pages_cached=self.memory.cache.cached,
            page_size=self.memory.page_size,
            slots_total=self.capacity.slots,
            slots_free=len(self.memory.free_slots),
            retractions=self.counters.retractions,
            cached_prompt_tokens=self.counters.cached_tokens,
            prompt_tokens=self.counters.prompt_tokens,
            output_tokens=self.counters.output_tokens,
            updating=self.weights.coming,
            drafted_tokens=self.counters.drafted_tokens,
            accepted_tokens=self.counters.accepted_tokens,
            released=sorted(self.occupation.released),
        )

    def internal_state(self, number: str, now: float) -> InternalState:
        """Return the reply to a GetInternalStateReq. Its size is bounded, and so is the time that it takes."""
        rows, prefixes = self.roster.rows(now), self.memory.cache.largest()
        return InternalState(id=number, load=self.load(), choices=rows, prefixes=prefixes)

    def _offer_exclusive(self, outputs: Outputs) -> None:
        """Offer exclusive use to the next request, if it is held for that and no other runs."""
        if self.planner.running or self.in_flight or not any(req.hold for req in self.waiting):
            return
        req = next((req for req in self.planner.line() if not self.planner.is_blocked(req)), None)
        if req is not None and req.hold and not req.offered:
            req.offered = True
            outputs.send(req.frontend, ExclusiveReady(rid=req.rid, attempt=req.attempt))

    def _apply_row(self, result: StepResult, index: int, row: Row, req: Req, outputs: Outputs) -> None:
        """Apply all parts of a row's result."""
        if row.sample and (error := self._error(result, index)):  # before its pages can be shared
            self.roster.end(req, error, outputs)
            return
        computed = row.start + row.count
        if index in result.prompt_logprobs:
            req.prompt_logprobs.append(result.prompt_logprobs[index])
        if not req.published and computed >= req.prompt_tokens:
            req.scored = True
            self.roster.publish(req, computed)
        if index in result.deferred:
            req.sit_out(result.step)
            if self.memory.states is not None:
                self.memory.states.rewind(req)
        elif row.sample:
            self._append_all(req, result, index, outputs)
        elif computed >= req.end:
            self.roster.end(req, FinishReason(FinishType.LENGTH), outputs)

    def _drop_row(self, result: StepResult, index: int, row: Row, req: Req) -> None:
        """Apply a row of a choice that has ended meanwhile. Pages that gave non-finite logits are not shared."""
        if row.sample and self._error(result, index):
            req.computed = 0
        if req.in_flight == 0:
            self.roster.free(req)

    def _error(self, result: StepResult, index: int) -> FinishReason | None:
        """Return the error of a row that sampled, or None if it has a valid token."""
        if index in result.deferred:
            return None
        if index in result.errors:
            return FinishReason(FinishType.ERROR, message=result.errors[index], code="invalid_grammar")
        token, vocab_size = result.token_ids[index], self.capacity.vocab_size
        if index in result.forced and invalid_ids(vocab_size, unpack_ints(result.forced[index])):
            return FinishReason(FinishType.ERROR, message="its grammar forced a token outside the vocabulary")
        if 0 <= token < vocab_size or (token == -1 and index in result.complete):
            return None
        return FinishReason(FinishType.ERROR, message="the model gave no finite logits")

    def _append_all(self, req: Req, result: StepResult, index: int, outputs: Outputs) -> None:
        """Append the sampled token and those forced after it to the output, up to the one that ends it."""
        complete = index in result.complete
        sampled = result.token_ids[index]
        if sampled < 0:
            self.roster.end(req, FinishReason(FinishType.STOP), outputs)
            return
        if index in result.logprobs:
            req.token_logprobs.append(result.logprobs[index])
        forced = unpack_ints(result.forced.get(index, b""))
        for place, token in enumerate((sampled, *forced)):
            self.counters.forced_tokens += place > 0
            req.tokens.append(token)
            self.counters.output_tokens += 1
            finish = finish_after(req, token, complete=complete and place == len(forced))
            if finish is not None:
                self.roster.end(req, finish, outputs)
                return
        req.length += len(forced)
        outputs.defer(req)
        req.fast_path = req.logprobs is None


def _special(result: StepResult) -> set[int]:
    """Return the rows whose result has more than a token."""
    return {
        *result.logprobs,
        *result.prompt_logprobs,
        *result.forced,
        *result.complete,
        *result.errors,
        *result.deferred,
    }
