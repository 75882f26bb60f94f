"""Outputs of an encoder's step: vectors, collected into one message with one raw frame for each frontend."""

from array import array

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.messages import BatchEmbeddingOutput, Message
from tercet.protocol.messages.values import FinishReason, pack_floats, pack_ints
from tercet.scheduler.core.embedding.req import EmbeddingReq


class VectorBatch:
    """Rows for one frontend."""

    def __init__(self) -> None:
        self.rids: list[str] = []
        self.attempts = array("i")
        self.waited: list[float] = []
        self.vectors: list[bytes] = []
        self.finishes: dict[int, FinishReason] = {}


class EmbeddingOutputs:
    """Collects the rows and the other messages of one call into the core."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._nothing = bytes(4 * width)
        self._batches: dict[str, VectorBatch] = {}
        self._others: list[Outgoing] = []

    def send(self, peer: str, message: Message) -> None:
        self._others.append((peer, message))

    def emit(self, req: EmbeddingReq, vector: bytes) -> None:
        """Add the vector of an input."""
        self._row(req).vectors.append(vector)

    def fail(self, req: EmbeddingReq, finish: FinishReason) -> None:
        """Add a failed input, which has no vector."""
        batch = self._row(req)
        batch.vectors.append(self._nothing)
        batch.finishes[len(batch.rids) - 1] = finish

    def collect(self) -> list[Outgoing]:
        """Return all collected messages."""
        outgoing = self._others
        for peer, batch in self._batches.items():
            message = BatchEmbeddingOutput(
                rids=batch.rids,
                attempts=pack_ints(batch.attempts),
                width=self._width,
                finishes=batch.finishes,
                queue_times=pack_floats(batch.waited),
            )
            outgoing.append((peer, message, b"".join(batch.vectors)))
        return outgoing

    def _row(self, req: EmbeddingReq) -> VectorBatch:
        batch = self._batches.setdefault(req.frontend, VectorBatch())
        batch.rids.append(req.rid)
        batch.attempts.append(req.attempt)
        batch.waited.append(req.waited)
        return batch
