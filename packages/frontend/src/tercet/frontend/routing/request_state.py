"""Base class of requests in flight: identity, placement and dispatch history, and the event for their consumer."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec

from tercet.frontend.errors import ApiError, RequestAbortedError
from tercet.frontend.http.trace_context import current_trace_id
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.encodings import EncodeMediaReq
from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput, TokenizedGenerateReqInput
from tercet.protocol.messages.values import LoRAAdapter, PrefillChunk


class SingleWaiterEvent:
    """Event for a single waiter. It is set for every token, and costs half as much as asyncio.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        """Wake the waiter, or make the next `wait` return at once."""
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait until the event is set, and clear it."""
        if not self._is_set:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._is_set = False


class Dispatch(msgspec.Struct):
    """Dispatch of a request to a scheduler. Times are in seconds of the request table's clock."""

    at: float
    scheduler: str
    detokenizer: str
    cause: str
    """Reason for the redispatch; empty for the first dispatch, and for one that may now run exclusively."""
    queue_time: float | None = None
    """Queue time in seconds at the scheduler; None until output says it."""
    first_output_at: float | None = None
    lost_at: float | None = None
    """Time at which another dispatch became necessary."""
    chunks: Sequence[PrefillChunk] = ()
    detokenize_seconds: float = 0.0


class RequestState(ABC):
    """Request from its first dispatch to its final answer. `wake` may be shared by the inputs of an HTTP request."""

    def __init__(self, rid: str, model: ServedModel, prompt_ids: bytes, wake: SingleWaiterEvent) -> None:
        self.rid = rid
        self.model = model
        self.prompt_ids = prompt_ids
        self.prompt_tokens = len(prompt_ids) // 4
        self.attempt = -1
        self.exclusive = False
        """The present attempt is exclusive: it runs while nothing else does."""
        self.offered_by = ""
        """Scheduler that runs only this request: a crash now is caused by the request."""
        self.scheduler = ""
        """Scheduler of the present attempt; empty while the request waits."""
        self.detokenizer = ""
        self.queue_time: float | None = None
        """Queue time in seconds at the scheduler; None until it is reported."""
        self.started_at = 0.0
        self.dispatched_at = 0.0
        self.dispatches: list[Dispatch] = []
        self._redispatch_cause = ""
        self.first_token_at: float | None = None
        self.ended_at: float | None = None
        """Time of the last token or of the vector; None if the request failed."""
        self.frames: Sequence[Frame] = ()
        """Raw frames of the message: arrays or embeddings of images, or the samples of an audio clip."""
        self.encodes: EmbeddingForm | None = None
        """Form of the embeddings of an image or sound; None for requests that no encoder of these gets."""
        self.trace_id = current_trace_id()
        """Trace in hex, if one is recorded."""
        self.refused = False
        """The last attempt was rejected. Without output the request is sent as a new one, so that queue limits
        apply."""
        self.refused_by: set[str] = set()
        self.crash_count = 0
        """Consecutive crashes of schedulers before the request had produced a token."""
        self.retries = 0
        """Redispatches since its last token because no token arrived."""
        self.stalled_at: set[str] = set()
        """Schedulers that held the request without output over several dispatches."""
        self.stalled_since: tuple[float, float] | None = None
        """Times of the first and the latest redispatch since its last token because tokens were missing."""
        self.error: ApiError | None = None
        self.aborted = False
        """The request was aborted on demand."""
        self._wake = wake

    @property
    def salt(self) -> str:
        """Return the cache salt; only requests with equal salts share cached prefixes."""
        return ""

    @property
    def content(self) -> bytes:
        """Return the hash of an image or sound to encode; empty for other requests."""
        return b""

    @property
    def has_text(self) -> bool:
        """Return whether the answer is text, which passes through a detokenizer."""
        return True

    @property
    def constrained(self) -> bool:
        """Return whether the request needs a scheduler with grammar support."""
        return False

    @property
    def lora(self) -> LoRAAdapter | None:
        """Return the adapter, which needs a scheduler with adapter support."""
        return None

    @property
    def next_attempt(self) -> int:
        return self.attempt + 1

    @property
    def output_tokens(self) -> int:
        """Return the number of output tokens of all choices."""
        return 0

    @property
    def has_progressed(self) -> bool:
        """Return whether the present attempt has produced output."""
        return False

    @property
    @abstractmethod
    def open_indices(self) -> list[int]:
        """Return the indices of the choices without a finish."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Return whether the request has its final answer or error."""

    @property
    @abstractmethod
    def signature(self) -> bytes:
        """Return bytes that identify a repeated request together with the prompt; the seed is left out."""

    @abstractmethod
    def error_param(self, code: str, context: int) -> str | None:
        """Return the client's parameter that a rejection code is about. `context` is the rejecting scheduler's."""

    @abstractmethod
    def position(self, index: int) -> int:
        """Return the next position of a choice."""

    @abstractmethod
    def message(
        self, attempt: int, detokenizer: str, *, exclusive: bool = False, deferred: bool = False
    ) -> TokenizedGenerateReqInput | TokenizedEmbeddingReqInput | EncodeMediaReq:
        """Return the message for a scheduler."""

    def dispatched(self, scheduler: str, detokenizer: str, now: float, *, exclusive: bool = False) -> None:
        """Record that the next attempt was sent."""
        self.attempt = self.next_attempt
        self.scheduler, self.detokenizer = scheduler, detokenizer
        self.dispatched_at = now
        self.dispatches.append(Dispatch(now, scheduler, detokenizer, self._redispatch_cause))
        self._redispatch_cause = ""
        self.exclusive, self.refused = exclusive, False
        if not exclusive or self.offered_by != scheduler:
            self.offered_by = ""

    def lost(self, cause: str, now: float) -> None:
        """Record the reason for the next dispatch."""
        self._redispatch_cause = cause
        if self.dispatches:
            self.dispatches[-1].lost_at = now

    def abort(self) -> None:
        """End the request on demand, unless it is done."""
        if not self.done:
            self.aborted = True
            self.fail(RequestAbortedError("The request was aborted."))

    def fail(self, error: ApiError) -> None:
        """Fail the request unless it is done."""
        if not self.done:
            self.error = error
            self._wake.set()
