"""Scripted engine whose model embeds or classifies; it has no detokenizer."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tercet.frontend.testing.engine import FakeEngine
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import (
    AbortReq,
    BatchEmbeddingOutput,
    ExclusiveReady,
    Message,
    TokenizedEmbeddingReqInput,
)
from tercet.protocol.messages.values import FinishReason, Role, pack_floats, pack_ints, unpack_ints

Vector = Sequence[float] | FinishReason


def by_ids(request: TokenizedEmbeddingReqInput) -> Vector:
    """Return a vector that depends on the ids of the input and the types of its tokens."""
    ids = unpack_ints(request.input_ids)
    types = unpack_ints(request.token_types) if request.token_types else [0]
    return [float(len(ids)), float(sum(ids)), float(sum(types)), 1.0]


def _accept(request: TokenizedEmbeddingReqInput) -> Message | None:  # noqa: ARG001
    return None


@dataclass
class EncodingEngine(FakeEngine):
    """FakeEngine whose steps answer all inputs at once, in one message per scheduler."""

    vector: Callable[[TokenizedEmbeddingReqInput], Vector] = by_ids
    refuse: Callable[[TokenizedEmbeddingReqInput], Message | None] = _accept
    inputs: list[tuple[str, TokenizedEmbeddingReqInput]] = field(default_factory=list)
    """Inputs that each scheduler holds."""

    def connect(self) -> None:
        """Make every scheduler ready; there is no detokenizer."""
        for peer in self.schedulers:
            self.scheduler_up(peer)

    def send(self, peer: str, message: Message, *frames: Frame) -> bool:
        """Handle a message of the frontend."""
        if not isinstance(message, TokenizedEmbeddingReqInput):
            if isinstance(message, AbortReq):
                self.inputs = [each for each in self.inputs if (each[0], each[1].rid) != (peer, message.rid)]
            return super().send(peer, message, *frames)
        if peer in self.full or peer not in self.schedulers:
            return False
        self.sent.append((peer, message))
        if refusal := self.refuse(message):
            asyncio.get_running_loop().call_soon(self._from, peer, refusal)
        elif message.deferred:
            offer = ExclusiveReady(rid=message.rid, attempt=message.attempt)
            asyncio.get_running_loop().call_soon(self._from, peer, offer)
        else:
            self.inputs.append((peer, message))
            self._schedule()
        return True

    def down(self, peer: str, role: Role = Role.SCHEDULER) -> None:
        """Let a peer die with everything it held."""
        self.inputs = [each for each in self.inputs if each[0] != peer]
        super().down(peer, role)

    def asked(self) -> list[TokenizedEmbeddingReqInput]:
        """Return every dispatch so far."""
        return [message for _, message in self.sent if isinstance(message, TokenizedEmbeddingReqInput)]

    def step(self, *, lost: bool = False) -> None:
        """Send the vectors of all held inputs."""
        held, self.inputs = self.inputs, []
        for peer in {peer for peer, _ in held}:
            batch, frame = self._vectors([request for where, request in held if where == peer])
            if not lost:
                self._from(peer, batch, memoryview(frame))

    def _vectors(self, requests: list[TokenizedEmbeddingReqInput]) -> tuple[BatchEmbeddingOutput, bytes]:
        width = self.limits.width
        answers = [self.vector(request) for request in requests]
        frame = b"".join(bytes(4 * width) if isinstance(each, FinishReason) else pack_floats(each) for each in answers)
        batch = BatchEmbeddingOutput(
            rids=[request.rid for request in requests],
            attempts=pack_ints(request.attempt for request in requests),
            width=width,
            finishes={row: each for row, each in enumerate(answers) if isinstance(each, FinishReason)},
            queue_times=b"" if self.waited is None else pack_floats([self.waited] * len(requests)),
        )
        return batch, frame
