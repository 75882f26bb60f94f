"""The embedding core as a script: inputs in, plans out, vectors out."""

from collections import deque

from tercet.protocol.messages.messages import BatchEmbeddingOutput, ControlReply, ExclusiveReady, Rejected
from tercet.protocol.messages.values import FinishReason, unpack_floats, unpack_ints
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.embedding.inputs import TextInputs
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult
from tercet.scheduler.core.embedding.scheduler import EmbeddingScheduler
from tercet.scheduler.core.events import Arrival, CoreMessage
from tercet.scheduler.testing import FakeEncoder

CAPACITY = EncoderCapacity(context_length=20, vocab_size=50, token_types=2, width=3)
POISON = 49


class Run:
    """A core, a fake encoder, and what came out for each frontend."""

    def __init__(self, capacity: EncoderCapacity = CAPACITY, room: int | None = None, **config: object) -> None:
        self.core = EmbeddingScheduler(CoreConfig(**{"token_budget": 8, **config}), TextInputs(capacity))  # type: ignore[arg-type]
        self.encoder = FakeEncoder(capacity, poison=POISON, room=room)
        self.plans: list[EncodePlan] = []
        self.in_flight: deque[EncodeResult] = deque()
        self.vectors: dict[tuple[str, str, int], list[float]] = {}
        """By frontend, rid and attempt."""
        self.finishes: dict[tuple[str, str, int], FinishReason] = {}
        self.rejected: dict[str, Rejected] = {}
        self.replies: list[ControlReply] = []
        self.offers: list[ExclusiveReady] = []

    def send(self, *messages: CoreMessage, source: str = "f0") -> None:
        self._take(self.core.handle(*(Arrival(source, message) for message in messages)))

    def plan(self) -> list[list[int]] | None:
        """The ids of each row of the next plan."""
        plan = self.core.schedule()
        if plan is None:
            return None
        self.plans.append(plan)
        self.in_flight.append(self.encoder.submit(plan).result())
        return [list(unpack_ints(row.input_ids)) for row in plan.rows]

    def commit(self) -> None:
        self._take(self.core.commit(self.in_flight.popleft()))

    def run(self) -> list[list[list[int]]]:
        """Step until nothing is left; the rows of every plan."""
        plans = []
        while (rows := self.plan()) is not None:
            plans.append(rows)
            self.commit()
        return plans

    def _take(self, outgoing: list) -> None:  # type: ignore[type-arg]
        for peer, message, *frames in outgoing:
            match message:
                case BatchEmbeddingOutput(rids=rids, width=width):
                    [frame] = frames
                    numbers = unpack_floats(frame)
                    assert len(numbers) == width * len(rids)
                    for row, (rid, attempt) in enumerate(zip(rids, unpack_ints(message.attempts), strict=True)):
                        key = peer, rid, attempt
                        assert key not in self.vectors
                        assert key not in self.finishes
                        if row in message.finishes:
                            self.finishes[key] = message.finishes[row]
                            assert set(numbers[row * width : (row + 1) * width]) == {0.0}
                        else:
                            self.vectors[key] = list(numbers[row * width : (row + 1) * width])
                case Rejected():
                    assert not frames
                    self.rejected[message.rid] = message
                case ExclusiveReady():
                    self.offers.append(message)
                case _:
                    self.replies.append(message)
