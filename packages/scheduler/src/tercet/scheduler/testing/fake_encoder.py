"""Fake encoder without torch: `FakeEncoder` computes vectors from token ids in plain Python."""

from collections.abc import Callable
from dataclasses import dataclass

from tercet.protocol.messages.messages import TokenizedEmbeddingReqInput
from tercet.protocol.messages.values import pack_floats, pack_ints, unpack_ints
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult, EncodeRow


def embedding_request(
    rid: str,
    ids: list[int],
    *,
    types: list[int] | None = None,
    attempt: int = 0,
    priority: int = 0,
    alone: bool = False,
    hold: bool = False,
    tenant: str = "",
) -> TokenizedEmbeddingReqInput:
    """Return an input in the form that a frontend sends."""
    return TokenizedEmbeddingReqInput(
        rid=rid,
        attempt=attempt,
        input_ids=pack_ints(ids),
        token_types=pack_ints(types or []),
        priority=priority,
        exclusive=alone,
        deferred=hold,
        tenant=tenant,
    )


@dataclass
class Encoded:
    """A step that is already finished."""

    value: EncodeResult

    def result(self) -> EncodeResult:
        return self.value


class FakeEncoder:
    """Encoder whose number i of an input's vector depends on every token, its position and its type, and on i.

    An input that begins with the id `poison` gives non-finite numbers; one of more than `room` tokens does not fit into
    memory.
    """

    def __init__(
        self,
        capacity: EncoderCapacity,
        *,
        poison: int = -1,
        room: int | None = None,
        before_step: Callable[[EncodePlan], None] | None = None,
    ) -> None:
        self._capacity = capacity
        self._poison = poison
        self._room = capacity.context_length if room is None else room
        self._before_step = before_step

    @property
    def capacity(self) -> EncoderCapacity:
        return self._capacity

    def submit(self, plan: EncodePlan) -> Encoded:
        """Run a plan at once."""
        if self._before_step is not None:
            self._before_step(plan)
        vectors = b"".join(pack_floats(self.vector(row)) for row in plan.rows)
        failed = [at for at, row in enumerate(plan.rows) if unpack_ints(row.input_ids)[0] == self._poison]
        too_large = [at for at, row in enumerate(plan.rows) if len(row.input_ids) // 4 > self._room]
        return Encoded(EncodeResult(step=plan.step, vectors=vectors, failed=failed, too_large=too_large))

    def close(self) -> None:
        pass

    def vector(self, row: EncodeRow) -> list[float]:
        """Return the vector of an input, each number between 1 and 2."""
        ids = unpack_ints(row.input_ids)
        types = unpack_ints(row.token_types) if row.token_types else [0] * len(ids)
        value = 0
        for token, kind in zip(ids, types, strict=True):
            value = (value * 31 + 7 * token + kind + 1) % 65_521
        return [1 + (value * (place + 1) % 65_521) / 65_536 for place in range(self._capacity.width)]
