"""Drives the core over a `FakeExecutor` as the loop does, checks every invariant after every call, keeps the books."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from tercet.protocol.messages import BatchTokenIDOutput, Rejected, TokenizedGenerateReqInput
from tercet.protocol.values import FinishReason, LogprobParams, Resume, SamplingParams, pack_ints, unpack_ints
from tercet.scheduler.core.config import Arrival, CoreConfig, CoreMessage
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.core.outputs import Outgoing
from tercet.scheduler.core.plan import Capacity, Plan
from tercet.scheduler.core.scheduler import Scheduler
from tercet.scheduler.testing.fake_executor import Done, FakeExecutor

FRONTEND = "frontend-0"
DETOKENIZER = "detokenizer-0"


def request(
    rid: str,
    prompt: Sequence[int],
    *,
    attempt: int = 0,
    resume: Sequence[Resume] = (),
    priority: int = 0,
    salt: str = "",
    alone: bool = False,
    logprobs: LogprobParams | None = None,
    **sampling: Any,
) -> TokenizedGenerateReqInput:
    """A request as a frontend would send it."""
    return TokenizedGenerateReqInput(
        rid=rid,
        attempt=attempt,
        detokenizer=DETOKENIZER,
        input_ids=pack_ints(prompt),
        sampling=SamplingParams(**{"max_new_tokens": 16, **sampling}),
        decode_spec=b"",
        resume=list(resume),
        priority=priority,
        cache_salt=salt,
        alone=alone,
        logprobs=logprobs,
    )


class Driver:
    """A core, its executor, and what came out."""

    def __init__(self, capacity: Capacity, config: CoreConfig | None = None, *, overlap: int = 0) -> None:
        self.core = Scheduler(config or CoreConfig(token_budget=16), capacity)
        self.executor = FakeExecutor(capacity)
        self.overlap = overlap
        self.in_flight: deque[Done] = deque()
        self.plans: list[Plan] = []
        self.output: dict[tuple[str, int], list[int]] = {}
        self.finishes: dict[tuple[str, int], FinishReason] = {}
        self.rejected: dict[str, Rejected] = {}
        self.others: list[Outgoing] = []
        self.logprob_count: dict[tuple[str, int], int] = {}
        self.prompt_logprob_count: dict[tuple[str, int], int] = {}

    def send(self, *messages: CoreMessage, source: str = FRONTEND) -> None:
        """Hand messages to the core."""
        self._take(self.core.handle(*(Arrival(source, message) for message in messages)))
        self.check()

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        plan = self.core.schedule()
        self.check()
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(self.executor.submit(plan))
        if self.in_flight and (plan is None or len(self.in_flight) > self.overlap):
            self._take(self.core.commit(self.in_flight.popleft().result()))
            self.check()
            return True
        return plan is not None

    def run(self, limit: int = 20_000) -> int:
        """Turn until nothing is left; returns the number of turns."""
        for turn in range(limit):
            if not self.step():
                return turn
        raise AssertionError(f"still busy after {limit} turns")

    def check(self) -> None:
        """All invariants hold."""
        assert violations(self.core) == []

    def assert_empty(self) -> None:
        """Nothing is held any more."""
        memory = self.core.memory
        assert list(self.core.roster) == []
        assert not self.core.planner.running
        assert len(self.core.waiting) == 0
        assert len(memory.free_slots) == self.core.capacity.slots
        assert memory.pools.free + memory.cache.cached == memory.pools.total
        assert not memory.retired

    def expected(self, prompt: Sequence[int], count: int, choice: int = 0) -> list[int]:
        """What the model says after a prompt, up to and with its end id."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.executor.next_token(tokens, choice))
            if tokens[-1] in self.core.capacity.eos_token_ids:
                break
        return tokens[len(prompt) :]

    def _take(self, outgoing: list[Outgoing]) -> None:
        for peer, message in outgoing:
            match message:
                case BatchTokenIDOutput():
                    assert peer == DETOKENIZER
                    self._rows(message)
                case Rejected():
                    assert message.rid not in self.rejected
                    self.rejected[message.rid] = message
                case _:
                    self.others.append((peer, message))

    def _rows(self, batch: BatchTokenIDOutput) -> None:
        offsets, ids = unpack_ints(batch.offsets), unpack_ints(batch.token_ids)
        openings = {opening.row: opening for opening in batch.openings}
        for row, (rid, index, position) in enumerate(
            zip(batch.rids, unpack_ints(batch.indices), unpack_ints(batch.positions), strict=True)
        ):
            key = rid, index
            assert key not in self.finishes, f"{key} got tokens after its final answer"
            if row in openings:
                assert openings[row].frontend == FRONTEND
                if (given := openings[row].prompt_logprobs) is not None:
                    self.prompt_logprob_count[key] = len(given)
            tokens = self.output.setdefault(key, [])
            assert position <= len(tokens), f"{key} skipped from {len(tokens)} to {position}"
            tokens[position:] = list(ids[offsets[row] : offsets[row + 1]])
            if row in batch.logprobs:
                self.logprob_count[key] = self.logprob_count.get(key, 0) + len(batch.logprobs[row])
            if row in batch.finishes:
                self.finishes[key] = batch.finishes[row]
