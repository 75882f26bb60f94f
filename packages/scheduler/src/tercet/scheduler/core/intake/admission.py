"""Intake of requests: each one is rejected, queued, or joined to the earlier attempt that is still held."""

from collections.abc import Sequence

from tercet.protocol.messages.messages import AbortReq, Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Grammar,
    LoRAAdapter,
    Resume,
    pack_ints,
    unpack_ints,
)
from tercet.scheduler.core.counters import CoreCounters
from tercet.scheduler.core.images import ImageNumbers, PromptImages, image_error, inputs_of
from tercet.scheduler.core.intake.pending_aborts import PendingAborts
from tercet.scheduler.core.intake.validation import audio_error, invalid_ids, request_error, text_error
from tercet.scheduler.core.outputs import Outputs
from tercet.scheduler.core.plan import Capacity
from tercet.scheduler.core.request import Req, finish_at_arrival, namespace_of
from tercet.scheduler.core.request_table import RequestTable
from tercet.scheduler.core.speculation.draft_policy import TOKEN
from tercet.scheduler.core.waiting.queue import WaitingQueue


class RequestIntake:
    """Accepts, rejects and aborts requests."""

    def __init__(
        self,
        capacity: Capacity,
        longest: int,
        max_queued: int,
        waiting: WaitingQueue,
        roster: RequestTable,
        counters: CoreCounters,
    ) -> None:
        self._vocab_size = capacity.vocab_size
        self._media = capacity.images, capacity.sounds, capacity.video
        self._whole_images = capacity.whole_images
        self._image_numbers = ImageNumbers()
        self._takes_audio, self._texts = capacity.audio is not None, capacity.texts
        self._reads_grammars = bool(capacity.grammars)
        self._runs_adapters = bool(capacity.adapters)
        self._ends = [token for token in capacity.eos_token_ids if 0 <= token < capacity.vocab_size]
        self._longest = min(longest, capacity.context_length)
        """Maximum tokens of prompt and output of one choice."""
        self._max_queued = max_queued
        self._waiting = waiting
        self._roster = roster
        self._counters = counters
        self._asked = PendingAborts()
        self._arrivals = 0
        self.draining = False

    def accept(self, source: str, request: TokenizedGenerateReqInput, outputs: Outputs, at: float) -> None:
        """Queue a request.

        A higher attempt takes over the choices of a held one; an equal or lower attempt is ignored.
        """
        held = self._roster.choices(source, request.rid)
        if any(req.attempt >= request.attempt for req in held.values()):
            self._counters.ignored += 1
            return
        if (refused := self._refusal(request)) is not None:
            self._counters.rejected += 1
            outputs.send(source, refused)
            self._give_up(held, outputs)
            return
        choices = request.resume or [Resume(index) for index in range(request.sampling.n)]
        known = {choice.index: unpack_ints(choice.output_ids) for choice in choices}
        self._give_up(
            {
                index: req
                for index, req in held.items()
                if index not in known or not _continues(req, request, known[index])
            },
            outputs,
        )
        fresh: list[Req] = []
        number = self._arrivals
        for index, output_ids in known.items():
            kept = held.get(index)
            if kept is not None and kept.finish is None:
                if kept.detokenizer != request.detokenizer:
                    outputs.close(kept)
                kept.route(request, len(output_ids))
                if kept.sent < kept.output_tokens:
                    outputs.emit(kept)
            else:
                fresh.append(self._new(request, source, index, output_ids, at, number))
        self._roster.add(fresh)
        asked = self._asked.finish(request.rid)
        for req in fresh:
            finish = finish_at_arrival(req) or asked
            if finish is not None:
                self._roster.end(req, finish, outputs)

    def abort(self, source: str, message: AbortReq, outputs: Outputs) -> None:
        """End the named choices in any state."""
        self._asked.note(message)
        own = self._roster.choices(source, message.rid).values()
        for req in self._roster.named(message.rid) if message.user_requested else own:
            if req.finish is None and (not message.indices or req.index in message.indices):
                self._counters.aborted += 1
                finish = FinishReason(FinishType.ABORT, message=message.reason, user_requested=message.user_requested)
                self._roster.end(req, finish, outputs)

    def refuse(self, grammar: Grammar, fault: str, outputs: Outputs) -> None:
        """Reject requests whose grammar cannot be read. Started ones are ended by the executor's result."""
        followers = [req for req in self._roster if req.sampling.grammar == grammar and req.finish is None]
        self._refuse_all(followers, "invalid_grammar", f"The grammar is refused: {fault}.", outputs)

    def refuse_adapter(self, adapter: LoRAAdapter, fault: str, outputs: Outputs) -> None:
        """Reject requests whose adapter cannot be read. Started ones have it already."""
        users = [req for req in self._roster if req.adapter == adapter and req.finish is None]
        self._refuse_all(users, "invalid_lora", f"The adapter is refused: {fault}.", outputs)

    def _refuse_all(self, asked: Sequence[Req], code: str, why: str, outputs: Outputs) -> None:
        """Reject the requests of these choices, except those that have started."""
        for (frontend, rid), attempt in {(req.frontend, req.rid): req.attempt for req in asked}.items():
            reqs = self._roster.choices(frontend, rid).values()
            if any(req.slot >= 0 or req.opened or req.finish is not None for req in reqs):
                continue
            self._counters.rejected += 1
            refused = Rejected(rid=rid, attempt=attempt, code=code, message=why, retry=True)
            outputs.send(frontend, refused)
            for req in reqs:
                self._roster.end(req, FinishReason(FinishType.ABORT), None)

    def drop_frontend(self, peer: str) -> None:
        """End all choices of a dead frontend."""
        for req in list(self._roster):
            if req.frontend == peer and req.finish is None:
                self._counters.aborted += 1
                self._roster.end(req, FinishReason(FinishType.ABORT), None)

    def _new(
        self,
        request: TokenizedGenerateReqInput,
        source: str,
        index: int,
        output_ids: Sequence[int],
        at: float,
        number: int,
    ) -> Req:
        req = Req(request, source, index, output_ids, self._arrivals, at, number)
        self._arrivals += 1
        if inputs := inputs_of(request):
            req.images = PromptImages(inputs, req.salt, self._image_numbers, whole=self._whole_images)
            req.images.write_keys(req.tokens)
        sampling = request.sampling
        req.end = req.prompt_tokens + sampling.max_new_tokens
        ends = [] if sampling.ignore_eos else self._ends
        req.stop_ids = frozenset([*sampling.stop_token_ids, *ends])
        return req

    def _give_up(self, held: dict[int, Req], outputs: Outputs) -> None:
        """End choices that a later attempt does not continue."""
        for req in held.values():
            if req.finish is None:
                outputs.close(req)
                self._roster.end(req, FinishReason(FinishType.ABORT), None)

    def _refusal(self, request: TokenizedGenerateReqInput) -> Rejected | None:
        """Return the rejection of a request that cannot run, otherwise None."""

        def rejected(code: str, message: str, *, retry: bool = False) -> Rejected:
            return Rejected(rid=request.rid, attempt=request.attempt, code=code, message=message, retry=retry)

        if self.draining:
            return rejected("draining", "this scheduler is leaving", retry=True)
        fault = request_error(request, self._vocab_size) or image_error(request, *self._media)
        fault = fault or audio_error(request, takes_audio=self._takes_audio) or text_error(request, self._texts)
        if fault is not None:
            return rejected("invalid_request", fault)
        if request.sampling.grammar is not None and not self._reads_grammars:
            return rejected("invalid_request", "this scheduler reads no grammars")
        ids = unpack_ints(request.input_ids)
        known = [unpack_ints(choice.output_ids) for choice in request.resume]
        if request.lora is not None and not self._runs_adapters:
            return rejected("invalid_lora", "this scheduler runs no adapters", retry=True)
        total = len(ids) + max([request.sampling.max_new_tokens, *map(len, known)])
        if total > self._longest or any(len(part) > request.sampling.max_new_tokens for part in known):
            message = f"prompt and output together have {total} tokens; at most {self._longest} are possible here"
            return rejected("context_length_exceeded", message)
        if not ids or invalid_ids(self._vocab_size, ids, unpack_ints(request.encoder_ids), *known):
            return rejected("invalid_token_ids", "the prompt is empty or holds a token id outside the vocabulary")
        if invalid_ids(self._vocab_size, unpack_ints(request.prediction)):
            return rejected("invalid_request", "the prediction holds a token id outside the vocabulary")
        if not request.resume and request.sampling.n > self._roster.room(request.tenant, self._max_queued):
            return rejected("overloaded", "too many requests are waiting", retry=True)
        return None


def _continues(req: Req, request: TokenizedGenerateReqInput, output_ids: Sequence[int]) -> bool:
    """Return whether a held choice has the same prompt and sampling, and has emitted at least `output_ids`."""
    count = len(output_ids)
    if count > req.output_tokens or (req.logprobs is not None and req.output_tokens - count > len(req.token_logprobs)):
        return False
    if (req.sampling, req.logprobs, req.adapter) != (request.sampling, request.logprobs, request.lora):
        return False
    if req.audio != request.audio:
        return False
    if req.salt != namespace_of(request):
        return False
    if inputs_of(request) != (req.images.inputs if req.images else []):
        return False
    known = req.ids()[: TOKEN * (req.prompt_tokens + count)]
    return known == bytes(request.input_ids) + pack_ints(output_ids)
