"""Kinds of inputs of an `EmbeddingScheduler`: its checks, plans and answers. `TextInputs` are those of text."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import Message, TokenizedEmbeddingReqInput
from tercet.protocol.messages.values import FinishReason, FinishType
from tercet.scheduler.core.embedding.outputs import EmbeddingOutputs
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult, EncodeRow
from tercet.scheduler.core.embedding.req import EmbeddingReq
from tercet.scheduler.core.embedding.validation import Fault, input_error
from tercet.scheduler.core.events import MediaReceived

NOT_FINITE = FinishReason(FinishType.ERROR, message="the model gave no finite numbers")
Received = TokenizedEmbeddingReqInput | MediaReceived

PlanT_co = TypeVar("PlanT_co", covariant=True)
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)


class Answers(Protocol):
    """Collector of the answers and the other messages of one call into the core."""

    def send(self, peer: str, message: Message) -> None: ...
    def emit(self, req: EmbeddingReq, vector: bytes) -> None:
        """Add the vector or the embeddings of an input."""
        ...

    def fail(self, req: EmbeddingReq, finish: FinishReason) -> None: ...
    def collect(self) -> list[Outgoing]:
        """Return all collected messages."""
        ...


class Inputs(Protocol[PlanT_co, ResultT_contra]):
    """Kind of inputs."""

    @property
    def kind(self) -> type[Received]: ...
    @property
    def refusal(self) -> str:
        """Return the reason why requests of another kind are refused."""
        ...

    @property
    def most_rows(self) -> int:
        """Return the maximum inputs of a step."""
        ...

    @property
    def most_bytes(self) -> int:
        """Return the maximum bytes of the arrays of all held inputs."""
        ...

    def fault(self, message: Received) -> Fault | None:
        """Return why an input can have no answer here, or None."""
        ...

    def req(self, message: Received, frontend: str, arrival: int, at: float) -> EmbeddingReq: ...
    def known(self, req: EmbeddingReq) -> bytes | None:
        """Return the answer to an input that needs no computing, or None."""
        ...

    def keep(self, req: EmbeddingReq, answer: bytes) -> bool:
        """Keep an answer for equal inputs. Return False if this kind does not."""
        ...

    def flush(self) -> str:
        """Drop kept answers. Return a description of them."""
        ...

    def plan(self, step: int, reqs: Sequence[EmbeddingReq]) -> PlanT_co: ...
    def results(self, result: ResultT_contra, step: int, reqs: Sequence[EmbeddingReq]) -> list[bytes | FinishReason]:
        """Return the vector, the embeddings or the failure of each input. Raises ValueError for another's result."""
        ...

    def answers(self) -> Answers: ...


class TextInputs:
    """Inputs of a model that returns one vector, or a classifier's scores, for each."""

    kind = TokenizedEmbeddingReqInput
    refusal = "this model generates no text"
    most_rows = 2**31
    most_bytes = 0

    def __init__(self, capacity: EncoderCapacity) -> None:
        self.capacity = capacity

    def fault(self, message: Received) -> Fault | None:
        assert isinstance(message, TokenizedEmbeddingReqInput)
        return input_error(message, self.capacity)

    def req(self, message: Received, frontend: str, arrival: int, at: float) -> EmbeddingReq:
        assert isinstance(message, TokenizedEmbeddingReqInput)
        content = message.input_ids, message.token_types
        return EmbeddingReq(message, content, len(message.input_ids) // 4, frontend, arrival, at)

    def known(self, req: EmbeddingReq) -> bytes | None:  # noqa: ARG002
        return None

    def keep(self, req: EmbeddingReq, answer: bytes) -> bool:  # noqa: ARG002
        return False

    def flush(self) -> str:
        return "an encoder caches nothing"

    def plan(self, step: int, reqs: Sequence[EmbeddingReq]) -> EncodePlan:
        return EncodePlan(step=step, rows=[self._row(req) for req in reqs])

    def results(self, result: EncodeResult, step: int, reqs: Sequence[EmbeddingReq]) -> list[bytes | FinishReason]:
        size = 4 * self.capacity.width
        if result.step != step or len(result.vectors) != size * len(reqs):
            raise ValueError(f"result of step {result.step} does not answer plan {step}")
        failures = dict.fromkeys(result.failed, NOT_FINITE)
        failures.update({row: _too_large(reqs[row]) for row in result.too_large})
        vectors = [result.vectors[row * size : (row + 1) * size] for row in range(len(reqs))]
        return [failures.get(row) or vector for row, vector in enumerate(vectors)]

    def answers(self) -> EmbeddingOutputs:
        return EmbeddingOutputs(self.capacity.width)

    def _row(self, req: EmbeddingReq) -> EncodeRow:
        request = req.request
        assert isinstance(request, TokenizedEmbeddingReqInput)
        return EncodeRow(request.input_ids, request.token_types if self.capacity.token_types > 1 else b"")


def _too_large(req: EmbeddingReq) -> FinishReason:
    """Return the finish of an input that is too large for memory: a shorter one may fit, the same one will not."""
    message = f"the input has {req.tokens} tokens, and there is not the memory here to compute so many at once"
    return FinishReason(FinishType.ERROR, message=message, code="context_length_exceeded")
