"""What becomes of a request at the door: refused, queued, or joined to the earlier attempt that is still held."""

from collections.abc import Sequence

from tercet.protocol.messages import AbortReq, Rejected, TokenizedGenerateReqInput
from tercet.protocol.values import FinishReason, FinishType, Resume, unpack_ints
from tercet.scheduler.core.counters import Counters
from tercet.scheduler.core.finish import finish_at_arrival
from tercet.scheduler.core.outputs import Outputs
from tercet.scheduler.core.plan import Capacity
from tercet.scheduler.core.queue import WaitingQueue
from tercet.scheduler.core.request import Req
from tercet.scheduler.core.roster import Roster


class Intake:
    """Accepts, refuses and aborts requests."""

    def __init__(
        self,
        capacity: Capacity,
        longest: int,
        max_queued: int,
        waiting: WaitingQueue,
        roster: Roster,
        counters: Counters,
    ) -> None:
        self._capacity = capacity
        self._longest = min(longest, capacity.context_length)
        """Tokens of prompt and output that one choice can ever have."""
        self._max_queued = max_queued
        self._waiting = waiting
        self._roster = roster
        self._counters = counters
        self._arrivals = 0
        self.draining = False

    def accept(self, source: str, request: TokenizedGenerateReqInput, outputs: Outputs) -> None:
        """Queue a request. A higher attempt of one still held takes it over, an equal or lower one is ignored."""
        held = self._roster.choices(request.rid)
        if any(req.attempt >= request.attempt for req in held.values()):
            self._counters.ignored += 1
            return
        refused = self._refusal(request)
        if refused is not None:
            self._counters.rejected += 1
            outputs.tell(source, refused)
            return
        choices = request.resume or [Resume(index) for index in range(request.sampling.n)]
        known = {choice.index: unpack_ints(choice.output_ids) for choice in choices}
        for index, req in held.items():
            if req.finish is None and (index not in known or not _continues(req, known[index])):
                self._roster.end(req, FinishReason(FinishType.ABORT), None)
        fresh = []
        for index, output_ids in known.items():
            kept = held.get(index)
            if kept is not None and kept.finish is None:
                kept.route(request, source, len(output_ids))
                if kept.sent < kept.output_tokens:
                    outputs.emit(kept)
            else:
                fresh.append(self._new(request, source, index, output_ids))
        self._roster.add(fresh, first=bool(request.resume))
        for req in fresh:
            finish = finish_at_arrival(req)
            if finish is not None:
                self._roster.end(req, finish, outputs)

    def abort(self, message: AbortReq, outputs: Outputs) -> None:
        """End the named choices, at whatever stage they are."""
        for index, req in self._roster.choices(message.rid).items():
            if req.finish is None and (not message.indices or index in message.indices):
                self._counters.aborted += 1
                self._roster.end(req, FinishReason(FinishType.ABORT, message=message.reason), outputs)

    def drop_frontend(self, peer: str) -> None:
        """Free all that a dead frontend asked for."""
        for req in list(self._roster):
            if req.frontend == peer and req.finish is None:
                self._counters.aborted += 1
                self._roster.end(req, FinishReason(FinishType.ABORT), None)

    def _new(self, request: TokenizedGenerateReqInput, source: str, index: int, output_ids: Sequence[int]) -> Req:
        req = Req(request, source, index, output_ids, self._arrivals)
        self._arrivals += 1
        sampling = request.sampling
        req.end = req.prompt_tokens + sampling.max_new_tokens
        ends = [] if sampling.ignore_eos else self._capacity.eos_token_ids
        req.stop_ids = frozenset([*sampling.stop_token_ids, *ends])
        return req

    def _refusal(self, request: TokenizedGenerateReqInput) -> Rejected | None:
        """Why a request cannot be run, if it cannot. The frontend has checked the same; this guards the executor."""
        if self.draining:
            message = "this scheduler is leaving"
            return Rejected(rid=request.rid, attempt=request.attempt, code="draining", message=message, retry=True)
        ids = unpack_ints(request.input_ids)
        outputs = [unpack_ints(choice.output_ids) for choice in request.resume]
        total = len(ids) + request.sampling.max_new_tokens
        if total > self._longest or any(len(ids) + len(output) > total for output in outputs):
            message = f"prompt and output together have {total} tokens; at most {self._longest} are possible here"
            return Rejected(rid=request.rid, attempt=request.attempt, code="context_length_exceeded", message=message)
        vocabulary = self._capacity.vocab_size
        if not ids or any(min(part) < 0 or max(part) >= vocabulary for part in (ids, *outputs) if len(part)):
            message = "the prompt is empty or holds a token id outside the vocabulary"
            return Rejected(rid=request.rid, attempt=request.attempt, code="invalid_token_ids", message=message)
        if not request.resume and len(self._waiting) + request.sampling.n > self._max_queued:
            message = "too many requests are waiting"
            return Rejected(rid=request.rid, attempt=request.attempt, code="overloaded", message=message, retry=True)
        return None


def _continues(req: Req, output_ids: Sequence[int]) -> bool:
    """Whether a held choice has emitted exactly `output_ids`, and perhaps more."""
    count = len(output_ids)
    if count > req.output_tokens or (req.logprobs is not None and req.output_tokens - count > len(req.token_logprobs)):
        return False
    return req.tokens[req.prompt_tokens : req.prompt_tokens + count].tolist() == list(output_ids)
