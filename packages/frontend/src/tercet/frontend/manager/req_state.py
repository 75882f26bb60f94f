"""Generation requests in flight. `ReqState` is sufficient to answer a client and to resume on another scheduler.

Rows are accepted strictly in position order. A row that was seen before or belongs to an older attempt is dropped. A
row beyond the next position is a gap: a message was lost, and the request has to be redispatched.
"""

from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import Enum, auto

import msgspec

from tercet.frontend.errors import ApiError, RequestAbortedError, ServerError, from_rejection
from tercet.frontend.manager.inputs.images import PlacedImage, images_in, sounds_in
from tercet.frontend.manager.inputs.prediction import predicted_tokens
from tercet.frontend.manager.quota import RequestSlot
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.request_state import RequestState, SingleWaiterEvent
from tercet.protocol.messages.messages import BatchStrOutput, DecodeSpec, FirstTextRow, TokenizedGenerateReqInput
from tercet.protocol.messages.values import (
    FinishReason,
    FinishType,
    Logprobs,
    LoRAAdapter,
    Resume,
    SamplingParams,
    pack_ints,
    unpack_ints,
)

_PROMPT_TAIL = 8
_ABORT = FinishReason(FinishType.ABORT, message="The request was aborted.", user_requested=True)
_FAILURES = (FinishType.ERROR, FinishType.ABORT)
"""Finish types that fail the whole request."""
_encode_spec = msgspec.msgpack.Encoder().encode


class OutputRow(msgspec.Struct, frozen=True):
    """Row of a BatchStrOutput: `token_ids` from `position` on, and the text they added."""

    index: int
    attempt: int
    position: int
    token_ids: Sequence[int]
    text: str = ""
    opening: FirstTextRow | None = None
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None


def unpack_rows(batch: BatchStrOutput) -> Iterator[tuple[str, OutputRow]]:
    """Yield (rid, row) for each row of a batch. Raises ValueError if its lists have different lengths."""
    indices, attempts, positions = map(unpack_ints, (batch.indices, batch.attempts, batch.positions))
    offsets, ids = unpack_ints(batch.offsets), unpack_ints(batch.token_ids)
    openings = {opening.row: opening for opening in batch.openings}
    if len(offsets) != len(batch.rids) + 1:
        raise ValueError("a batch of text has offsets for another number of rows")
    for row, (rid, index, attempt, position, text) in enumerate(
        zip(batch.rids, indices, attempts, positions, batch.texts, strict=True)
    ):
        token_ids = ids[offsets[row] : offsets[row + 1]]
        finish, logprobs = batch.finishes.get(row), batch.logprobs.get(row)
        yield rid, OutputRow(index, attempt, position, token_ids, text, openings.get(row), finish, logprobs)


class Verdict(Enum):
    """Result of accepting a row."""

    ACCEPTED = auto()
    STALE = auto()
    """Seen before, of an older attempt, or after the finish."""
    GAP = auto()
    ABORTED = auto()
    """A scheduler aborted it, and no client had requested that."""


ACCEPTED = Verdict.ACCEPTED
"""Bound to a module name because an enum lookup costs as much as the rest of the check, and runs for every row."""


class Update(msgspec.Struct, frozen=True):
    """Output of one choice since the previous update."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[Logprobs]
    finish: FinishReason | None

    def cut(self, tokens: int) -> "list[Update]":
        """Split into updates of at least `tokens` tokens; the last may be shorter, and has the text and the finish."""
        if len(self.token_ids) <= tokens or not self.logprobs:
            return [self]
        pieces, begin, end, parts = [], 0, 0, []
        for part in self.logprobs:
            parts.append(part)
            end += len(part.chosen) // 4
            if end - begin >= tokens:
                pieces.append(Update(self.index, "", self.token_ids[begin:end], parts, None))
                begin, parts = end, []
        pieces.append(Update(self.index, self.text, self.token_ids[begin:], parts, self.finish))
        return pieces


class ChoiceState:
    """State of one of a request's n choices: its whole output, and the part already delivered."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids = array("i")
        self.chars = 0
        self.last_token_at = 0.0
        """Time of its latest token, in seconds of the handler's clock."""
        self.weights = ""  # fingerprint of those that computed its latest row
        self.finish: FinishReason | None = None
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._ids_delivered = 0

    def accept(self, row: OutputRow) -> Verdict:
        """Append a row of the current attempt."""
        if self.finish is not None or row.position < len(self.token_ids):
            return Verdict.STALE
        if row.position > len(self.token_ids):
            return Verdict.GAP
        if row.finish is not None and row.finish.type is FinishType.ABORT and not row.finish.user_requested:
            return Verdict.ABORTED
        self.token_ids.extend(row.token_ids)
        if row.text:
            self._texts.append(row.text)
            self.chars += len(row.text)
        if row.logprobs is not None:
            self._logprobs.append(row.logprobs)
        self.finish = row.finish
        return ACCEPTED

    def pop_update(self, *, keeps_aborted: bool = False) -> Update:
        """Return and clear the output since the previous call. A finish that fails the request is left out."""
        ids = self.token_ids[self._ids_delivered :]
        finish = self.finish
        if finish is not None and finish.type in _FAILURES and not (keeps_aborted and finish.type is FinishType.ABORT):
            finish = None
        update = Update(self.index, "".join(self._texts), ids, self._logprobs, finish)
        self._ids_delivered += len(ids)
        self._texts = []
        self._logprobs = []
        return update


class ReqState(RequestState):
    """Generation request with n choices and the output of each."""

    def __init__(
        self,
        rid: str,
        request: GenerateRequest,
        model: ServedModel,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        wake: SingleWaiterEvent,
        prediction: Sequence[int] = (),
        images: Sequence[PlacedImage] = (),
    ) -> None:
        super().__init__(rid, model, pack_ints(prompt_ids), wake)
        self.request = request
        self.prediction = prediction
        self.places = [each.place for each in images]
        self.audio = None if request.audio is None else request.audio.input
        self.frames = [*(each.array for each in images), *([request.audio.samples] if request.audio else [])]
        self.sampling = sampling
        self.choices = [ChoiceState(index) for index in range(sampling.n)]
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache when the first choice began."""
        self.prompt_logprobs: Logprobs | None = None
        self._updated: dict[int, None] = {}
        self._unfinished = sampling.n
        self._tokens_at_dispatch = 0
        self.has_tokens = False
        self.finish_only = False
        """Wake the consumer only when a choice finishes: a wake-up per token costs more than the token."""

    @property
    def salt(self) -> str:
        """Return the salt of the request and its adapter: equal tokens have different KV under different adapters."""
        lora, salt = self.request.lora, self.request.options.cache_salt
        return salt if lora is None else f"{lora.sha256}\0{salt}"

    @property
    def lora(self) -> LoRAAdapter | None:
        return self.request.lora

    @property
    def constrained(self) -> bool:
        return self.sampling.grammar is not None

    @property
    def signature(self) -> bytes:
        """Return the encoded sampling parameters without the seed, and the hashes of adapter, images and sounds."""
        lora = self.request.lora
        adapter = b"" if lora is None else lora.sha256.encode()
        return msgspec.msgpack.encode(msgspec.structs.replace(self.sampling, seed=0)) + b"".join(
            [adapter, *(each.sha256 for each in self.places), self.audio.sha256 if self.audio else b""]
        )

    @property
    def open_indices(self) -> list[int]:
        return [choice.index for choice in self.choices if choice.finish is None]

    @property
    def done(self) -> bool:
        return self.error is not None or not self._unfinished

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def has_progressed(self) -> bool:
        return self.output_tokens > self._tokens_at_dispatch

    def error_param(self, code: str, context: int = 0) -> str | None:
        """Return the parameter at fault; for an exceeded context, `max_tokens` if the prompt alone fits."""
        request, options = self.request, self.request.options
        match code:
            case "context_length_exceeded" if options.max_tokens is not None and self.prompt_tokens < context:
                return options.param_names.max_tokens
            case "context_length_exceeded" | "invalid_token_ids":
                return request.prompt.param
            case "invalid_grammar":
                return options.param_names.grammar
            case "invalid_lora":
                return options.param_names.model
        return None

    def position(self, index: int) -> int:
        return len(self.choices[index].token_ids)

    def dispatched(self, scheduler: str, detokenizer: str, now: float, *, exclusive: bool = False) -> None:
        super().dispatched(scheduler, detokenizer, now, exclusive=exclusive)
        self._tokens_at_dispatch = self.output_tokens

    def accept(self, row: OutputRow) -> Verdict:
        """Append a row and wake the consumer; with `finish_only`, wake it only at a finish."""
        if row.attempt != self.attempt or self.error is not None or not 0 <= row.index < len(self.choices):
            return Verdict.STALE
        verdict = self.choices[row.index].accept(row)
        if verdict is not ACCEPTED:
            return verdict
        if row.opening is not None:
            if not self.has_tokens:  # a resumed request finds its own tokens in the cache
                self.cached_tokens = row.opening.cached_tokens
            self.prompt_logprobs = self.prompt_logprobs or row.opening.prompt_logprobs
        if len(row.token_ids):
            self.has_tokens = True
            self.crash_count = self.retries = 0
            self.stalled_since = None
        self._updated[row.index] = None
        if row.finish is not None:
            self._finished(row.finish)
        if row.finish is not None or not self.finish_only:
            self._wake.set()
        return verdict

    def _finished(self, finish: FinishReason) -> None:
        """Record the finish of one choice; errors and aborts fail the request."""
        self._unfinished -= 1
        if finish.type is FinishType.ERROR:
            message = finish.message or "The server ended this request."
            code = finish.code
            self.error = from_rejection(code, message, self.error_param(code)) if code else ServerError(message)
        if finish.type is FinishType.ABORT:
            self.aborted = True
            if not self.request.keeps_aborted:
                self.error = RequestAbortedError("The request was aborted.")

    def abort(self) -> None:
        """End the request on demand: with its output so far if it keeps that, otherwise with an error."""
        if not self.request.keeps_aborted:
            super().abort()
            return
        for index in self.open_indices:
            self.choices[index].finish = _ABORT
            self._updated[index] = None
            self._finished(_ABORT)
        self._wake.set()

    def pop_updates(self) -> list[Update]:
        """Return the updates of every choice with new output, in order of arrival."""
        updated, self._updated = self._updated, {}
        keeps = self.request.keeps_aborted
        return [self.choices[index].pop_update(keeps_aborted=keeps) for index in updated]

    def message(
        self, attempt: int, detokenizer: str, *, exclusive: bool = False, deferred: bool = False
    ) -> TokenizedGenerateReqInput:
        """Return the message for a scheduler, which resumes after the output so far."""
        resume = []
        if attempt and (self.output_tokens or not self.refused):
            resume = [Resume(index, pack_ints(self.choices[index].token_ids)) for index in self.open_indices]
        request, options, encoder = self.request, self.request.options, self.model.limits.encoder
        start = self.prompt_ids if encoder is None else pack_ints(encoder.start)
        spec = DecodeSpec(
            stop=options.stop,
            include_stop=options.include_stop,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            prompt_tail=start[-4 * _PROMPT_TAIL :],
            resume=resume,
            tokenizer=self.model.files.tokenizer_sha,
            min_tokens=self.sampling.min_new_tokens,
            stops_in_special_tokens=request.stops_in_special_tokens,
            chars_sent={each.index: self.choices[each.index].chars for each in resume},
        )
        return TokenizedGenerateReqInput(
            rid=self.rid,
            attempt=attempt,
            detokenizer=detokenizer,
            input_ids=start,
            sampling=self.sampling,
            decode_spec=_encode_spec(spec),
            logprobs=options.logprobs,
            resume=resume,
            priority=options.priority,
            cache_salt=options.cache_salt,
            exclusive=exclusive,
            deferred=deferred,
            lora=request.lora,
            prediction=pack_ints(self.prediction),
            tenant=request.tenant,
            traced=bool(self.trace_id),
            images=images_in(self.places),
            audio=self.audio,
            sounds=sounds_in(self.places),
            embedded=bool(self.places) and self.model.limits.embeddings is not None,
            encoder_ids=b"" if encoder is None else self.prompt_ids,
        )


class GenerationUpdate(msgspec.Struct, frozen=True):
    """Update of one choice of the prompt with the index `prompt`."""

    prompt: int
    update: Update


class Generation:
    """Request states that share one event, so their consumer receives all pending updates in one batch."""

    def __init__(self, slot: RequestSlot) -> None:
        self.slot = slot
        self.wake = SingleWaiterEvent()
        self.states: list[ReqState] = []

    def notify_on_finish_only(self) -> None:
        """Notify only when a choice has ended, for callers that need no part of an answer."""
        for state in self.states:
            state.finish_only = True

    async def arrivals(self) -> AsyncIterator[list[GenerationUpdate]]:
        """Yield non-empty lists of updates until every request is done. Raises the ApiError of a failed request."""
        while True:
            await self.wake.wait()
            updates: list[GenerationUpdate] = []
            error: ApiError | None = None
            done = True
            for prompt, state in enumerate(self.states):
                updates += [GenerationUpdate(prompt, update) for update in state.pop_updates()]
                # Read these before the yield: changes during the yield belong to the next round.
                error, done = error or state.error, done and state.done
            if updates:
                yield updates
            if error is not None:
                raise error
            if done:
                return

    @property
    def prompt_tokens(self) -> int:
        """Return the number of prompt tokens, counting each prompt once, not once per choice."""
        return sum(state.prompt_tokens for state in self.states)

    @property
    def cached_tokens(self) -> int:
        """Return the number of prompt tokens found in the prefix cache."""
        return sum(state.cached_tokens for state in self.states)

    @property
    def output_tokens(self) -> int:
        return sum(state.output_tokens for state in self.states)

    def prediction_tokens(self) -> tuple[int, int] | None:
        """Return (accepted, rejected) predicted tokens, or None if no request has a prediction."""
        pairs = [(state.prediction, choice) for state in self.states if state.prediction for choice in state.choices]
        if not pairs:
            return None
        accepted = sum(predicted_tokens(prediction, choice.token_ids) for prediction, choice in pairs)
        return accepted, sum(len(prediction) for prediction, _ in pairs) - accepted
