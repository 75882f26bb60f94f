"""All that is known of a request in flight: enough to answer its client, and to go on with it elsewhere.

Rows are accepted strictly in position order. A row seen before or of an older attempt is dropped; a row from beyond the
next position is a gap, which means that a message was lost and the request has to be dispatched again.
"""

from array import array
from collections.abc import Iterator, Sequence
from enum import Enum, auto

import msgspec

from tercet.frontend.errors import RequestAbortedError, ServerError, from_rejection
from tercet.frontend.manager.request import GenerateRequest
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.request_state import RequestState
from tercet.frontend.routing.wake import Wake
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
_FAILURES = (FinishType.ERROR, FinishType.ABORT)
"""Ends that are no finish of a choice but an error of its request."""
_encode_spec = msgspec.msgpack.Encoder().encode


class OutputRow(msgspec.Struct, frozen=True):
    """One row of a BatchStrOutput: `token_ids` from `position` on, and the text they added."""

    index: int
    attempt: int
    position: int
    token_ids: Sequence[int]
    text: str = ""
    opening: FirstTextRow | None = None
    finish: FinishReason | None = None
    logprobs: Logprobs | None = None


def rows_of(batch: BatchStrOutput) -> Iterator[tuple[str, OutputRow]]:
    """The rows of a batch, each with its rid. Raises ValueError for a batch whose lists are not of one length."""
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
    """What became of a row."""

    ACCEPTED = auto()
    STALE = auto()
    """Seen before, of an older attempt, or after the end."""
    GAP = auto()
    ABORTED = auto()
    """A scheduler ended it, and nobody here had asked for that."""


ACCEPTED = Verdict.ACCEPTED
"""Looked up once, for every row needs it: to look up an enum's member costs as much as the rest of a row's check."""


class Update(msgspec.Struct, frozen=True):
    """What is new of one choice since the consumer last looked."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: list[Logprobs]
    finish: FinishReason | None

    def cut(self, tokens: int) -> "list[Update]":
        """Return it as updates of so many tokens, or a few more; the last has the text and the end."""
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
    """One of a request's n continuations: everything emitted so far, and how much of it the consumer has taken."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids = array("i")
        self.chars = 0
        self.heard_at = 0.0
        """When its last token came."""
        self.finish: FinishReason | None = None
        self._texts: list[str] = []
        self._logprobs: list[Logprobs] = []
        self._ids_taken = 0

    def accept(self, row: OutputRow) -> Verdict:
        """Take a row of the current attempt."""
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

    def take(self) -> Update:
        """What came since the last call."""
        ids = self.token_ids[self._ids_taken :]
        finish = None if self.finish is not None and self.finish.type in _FAILURES else self.finish
        update = Update(self.index, "".join(self._texts), ids, self._logprobs, finish)
        self._ids_taken += len(ids)
        self._texts = []
        self._logprobs = []
        return update


class ReqState(RequestState):
    """A request to generate: n choices, everything emitted of each, and what they were asked for."""

    def __init__(
        self,
        rid: str,
        request: GenerateRequest,
        model: ServedModel,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        wake: Wake,
        prediction: Sequence[int] = (),
    ) -> None:
        super().__init__(rid, model, pack_ints(prompt_ids), wake)
        self.request = request
        self.prediction = prediction
        self.sampling = sampling
        self.choices = [ChoiceState(index) for index in range(sampling.n)]
        self.cached_tokens = 0
        """Of its prompt, when its first choice began."""
        self.prompt_logprobs: Logprobs | None = None
        self._news: dict[int, None] = {}
        self._unfinished = sampling.n
        self._tokens_at_dispatch = 0
        self.has_tokens = False
        """Whether any token has come."""
        self.tells_ends = False
        """Its consumer hears only of a choice that ended: to wake it for every token costs more than the token."""

    @property
    def salt(self) -> str:
        """The salt asked for, and the adapter's: keys and values of equal tokens differ between adapters."""
        lora = self.request.lora
        return self.request.cache_salt if lora is None else f"{lora.sha256}\0{self.request.cache_salt}"

    @property
    def lora(self) -> LoRAAdapter | None:
        """The adapter asked for."""
        return self.request.lora

    @property
    def constrained(self) -> bool:
        """Whether its output follows a grammar."""
        return self.sampling.grammar is not None

    @property
    def signature(self) -> bytes:
        """Its sampling parameters without the seed, and its adapter."""
        lora = self.request.lora
        adapter = b"" if lora is None else lora.sha256.encode()
        return msgspec.msgpack.encode(msgspec.structs.replace(self.sampling, seed=0)) + adapter

    @property
    def open_indices(self) -> list[int]:
        """The choices that have no finish yet."""
        return [choice.index for choice in self.choices if choice.finish is None]

    @property
    def done(self) -> bool:
        """Whether the request has its final answer."""
        return self.error is not None or not self._unfinished

    @property
    def output_tokens(self) -> int:
        """Tokens emitted over all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)

    @property
    def has_progressed(self) -> bool:
        """Whether its present attempt has brought any token."""
        return self.output_tokens > self._tokens_at_dispatch

    def blamed(self, code: str, context: int = 0) -> str | None:
        """The prompt, the length asked for where the prompt alone would fit, or what named a grammar or an adapter."""
        request = self.request
        match code:
            case "context_length_exceeded" if request.max_tokens is not None and self.prompt_tokens < context:
                return request.param_names.max_tokens
            case "context_length_exceeded" | "invalid_token_ids":
                return request.prompt.param
            case "invalid_grammar":
                return request.param_names.grammar
            case "invalid_lora":
                return request.param_names.model
        return None

    def position(self, index: int) -> int:
        """The number of tokens emitted."""
        return len(self.choices[index].token_ids)

    def dispatched(self, scheduler: str, detokenizer: str, now: float, *, alone: bool = False) -> None:
        """The next attempt is on its way."""
        super().dispatched(scheduler, detokenizer, now, alone=alone)
        self._tokens_at_dispatch = self.output_tokens

    def accept(self, row: OutputRow) -> Verdict:
        """Take a row of output. Wakes the consumer, but only at a choice's end if it `tells_ends`."""
        if row.attempt != self.attempt or self.error is not None or not 0 <= row.index < len(self.choices):
            return Verdict.STALE
        verdict = self.choices[row.index].accept(row)
        if verdict is not ACCEPTED:
            return verdict
        if row.opening is not None:
            if not self.has_tokens:  # later ones find what this request has computed itself
                self.cached_tokens = row.opening.cached_tokens
            self.prompt_logprobs = self.prompt_logprobs or row.opening.prompt_logprobs
        if len(row.token_ids):
            self.has_tokens = True
            self.suspicions = self.retries = 0
            self.unheard = None
        self._news[row.index] = None
        if row.finish is not None:
            self._finished(row.finish)
        if row.finish is not None or not self.tells_ends:
            self._wake.set()
        return verdict

    def _finished(self, finish: FinishReason) -> None:
        """One choice has ended."""
        self._unfinished -= 1
        if finish.type is FinishType.ERROR:
            message = finish.message or "The server ended this request."
            code = finish.code
            self.error = from_rejection(code, message, self.blamed(code)) if code else ServerError(message)
        if finish.type is FinishType.ABORT:
            self.error = RequestAbortedError("The request was aborted.")

    def take(self) -> list[Update]:
        """What is new of every choice that has something new, in the order it came."""
        news, self._news = self._news, {}
        return [self.choices[index].take() for index in news]

    def message(
        self, attempt: int, detokenizer: str, *, alone: bool = False, hold: bool = False
    ) -> TokenizedGenerateReqInput:
        """The request as a scheduler gets it, going on from what has been emitted."""
        resume = []
        if attempt and (self.output_tokens or not self.refused):
            resume = [Resume(index, pack_ints(self.choices[index].token_ids)) for index in self.open_indices]
        request = self.request
        spec = DecodeSpec(
            stop=request.stop,
            include_stop=request.include_stop,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
            prompt_tail=self.prompt_ids[-4 * _PROMPT_TAIL :],
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
            input_ids=self.prompt_ids,
            sampling=self.sampling,
            decode_spec=_encode_spec(spec),
            logprobs=request.logprobs,
            resume=resume,
            priority=request.priority,
            cache_salt=request.cache_salt,
            exclusive=alone,
            deferred=hold,
            lora=request.lora,
            prediction=pack_ints(self.prediction),
            tenant=request.tenant,
        )
