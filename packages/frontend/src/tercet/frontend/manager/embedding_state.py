"""Inputs of embedding, scoring and classification requests in flight."""

import math
import struct
from collections import deque
from collections.abc import Callable, Iterator

from tercet.frontend.errors import RequestAbortedError, ServerError, from_rejection
from tercet.frontend.manager.quota import RequestSlot
from tercet.frontend.manager.req_state import Verdict
from tercet.frontend.model.embedding_request import EmbeddingRequest, EncodedInput
from tercet.frontend.model.served_model import ServedModel
from tercet.frontend.routing.request_state import RequestState, SingleWaiterEvent
from tercet.protocol.messages.messages import BatchEmbeddingOutput, TokenizedEmbeddingReqInput
from tercet.protocol.messages.values import FinishReason, FinishType, unpack_floats, unpack_ints

MAX_IN_FLIGHT = 256
"""Maximum number of inputs of one HTTP request that are at schedulers at the same time."""


class EmbeddingState(RequestState):
    """Input of an embedding, scoring or classification request: one choice with one position, the vector."""

    def __init__(
        self,
        rid: str,
        given: EncodedInput,
        model: ServedModel,
        request: EmbeddingRequest,
        wake: SingleWaiterEvent,
        param: str,
    ) -> None:
        super().__init__(rid, model, given.ids, wake)
        self.vector = b""
        """Little-endian float32; empty until the vector has arrived."""
        self._types = given.types
        self._priority = request.priority
        self._tenant = request.tenant
        self._param = param

    @property
    def has_text(self) -> bool:
        return False

    @property
    def next_attempt(self) -> int:
        """Return the next attempt number. A rejected attempt never ran: its number is reused, so queue limits apply."""
        return self.attempt if self.refused else self.attempt + 1

    @property
    def open_indices(self) -> list[int]:
        return [] if self.vector else [0]

    @property
    def done(self) -> bool:
        return self.error is not None or bool(self.vector)

    @property
    def signature(self) -> bytes:
        return self._types

    def error_param(self, code: str, context: int) -> str | None:  # noqa: ARG002
        return self._param if code in {"context_length_exceeded", "invalid_token_ids"} else None

    def position(self, index: int) -> int:  # noqa: ARG002
        return 0

    def accept(self, attempt: int, vector: bytes, finish: FinishReason | None) -> Verdict:
        """Store the vector or the error that a scheduler returned for this input."""
        if attempt != self.attempt or self.done:
            return Verdict.STALE
        if finish is None:
            self.vector = vector
        elif finish.type is FinishType.ABORT and not finish.user_requested:
            return Verdict.ABORTED
        elif finish.type is FinishType.ABORT:
            self.error = RequestAbortedError("The request was aborted.")
        else:
            message, code = finish.message or "The server ended this request.", finish.code
            self.error = from_rejection(code, message, self.error_param(code, 0)) if code else ServerError(message)
        self._wake.set()
        return Verdict.ACCEPTED

    def message(
        self,
        attempt: int,
        detokenizer: str,  # noqa: ARG002
        *,
        exclusive: bool = False,
        deferred: bool = False,
    ) -> TokenizedEmbeddingReqInput:
        return TokenizedEmbeddingReqInput(
            rid=self.rid,
            attempt=attempt,
            input_ids=self.prompt_ids,
            token_types=self._types,
            priority=self._priority,
            exclusive=exclusive,
            deferred=deferred,
            tenant=self._tenant,
        )


class EmbeddingBatch:
    """Inputs of one request, in order; they share one event, and are sent in windows that do not fill a queue."""

    def __init__(self, slot: RequestSlot) -> None:
        self.slot = slot
        self.wake = SingleWaiterEvent()
        self.states: list[EmbeddingState] = []

    async def run(self, start: Callable[[EmbeddingState], None]) -> None:
        """Dispatch every input and wait for its vector. Raises the ApiError of the first input that fails."""
        waiting, running = deque(self.states), list[EmbeddingState]()
        while waiting or running:
            while waiting and len(running) < MAX_IN_FLIGHT:
                running.append(waiting.popleft())
                start(running[-1])
            await self.wake.wait()
            for state in running:
                if state.error is not None:
                    raise state.error
            running = [state for state in running if not state.done]

    @property
    def tokens(self) -> int:
        return sum(state.prompt_tokens for state in self.states)

    @property
    def vectors(self) -> list[bytes]:
        """Return the vector of each input; valid once `run` has returned."""
        return [state.vector for state in self.states]


def unpack_vectors(
    batch: BatchEmbeddingOutput, frames: tuple[memoryview, ...]
) -> Iterator[tuple[str, int, bytes, FinishReason | None, float]]:
    """Yield (rid, attempt, vector, finish, queue seconds) for each row; NaN stands for an unknown queue time.

    Raises ValueError if the frame size does not match the number of rows.
    """
    size = 4 * batch.width
    if len(frames) != 1 or batch.width < 1 or frames[0].nbytes != size * len(batch.rids):
        raise ValueError(f"{len(batch.rids)} vectors of {batch.width} numbers came with frames of another size")
    data = bytes(frames[0])
    waits = unpack_floats(batch.queue_times) or [math.nan] * len(batch.rids)
    for row, (rid, attempt, queue_time) in enumerate(zip(batch.rids, unpack_ints(batch.attempts), waits, strict=True)):
        yield rid, attempt, data[row * size : (row + 1) * size], batch.finishes.get(row), queue_time


def unpack_vector(vector: bytes) -> tuple[float, ...]:
    """Unpack a vector of little-endian float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)
