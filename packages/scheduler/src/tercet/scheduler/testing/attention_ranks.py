"""Several attention ranks without torch: a driver of their core, and an executor of one `FakeExecutor` for each."""

from collections.abc import Sequence
from typing import Any

from tercet.protocol.messages.messages import TokenizedGenerateReqInput
from tercet.scheduler.core.config import CoreConfig
from tercet.scheduler.core.data_parallel.plans import plan_of
from tercet.scheduler.core.data_parallel.scheduler import DataParallelScheduler
from tercet.scheduler.core.invariants import violations
from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.testing.driver import Driver, assert_empty
from tercet.scheduler.testing.fake_executor import Done, FakeExecutor


class FakeRanks:
    """An `Executor` whose ranks each compute their part of a plan."""

    grammars = images = audio = None

    def __init__(self, capacity: Capacity, ranks: int, **options: Any) -> None:
        """Create the ranks, each with the capacity; the options are those of `FakeExecutor`."""
        self.capacity = capacity
        self.ranks = [FakeExecutor(capacity, **options) for _ in range(ranks)]
        self.weights, self.adapters = self.ranks[0].weights, self.ranks[0].adapters

    @property
    def late_masks(self) -> "FakeRanks":
        """Return this object, which has the late masks of all ranks."""
        return self

    @property
    def busy(self) -> bool:
        """Return whether a mask was late."""
        return any(rank.late_masks.busy for rank in self.ranks)

    def pop_ready(self, wait: float = 0.0) -> list[tuple[int, int]]:  # noqa: ARG002
        """Return (slot, step) of all late masks."""
        return [each for rank in self.ranks for each in rank.late_masks.pop_ready()]

    def submit(self, plan: Plan) -> Done:
        """Run the part of each rank, whose rows follow those of the rank before."""
        done = [rank.submit(plan_of(plan, number, self.capacity.slots)) for number, rank in enumerate(self.ranks)]
        whole, first = StepResult(step=plan.step, token_ids=[]), 0
        for result in (each.value for each in done):
            for name in ("logprobs", "prompt_logprobs", "forced", "errors"):
                getattr(whole, name).update({first + row: given for row, given in getattr(result, name).items()})
            for name in ("complete", "deferred"):
                getattr(whole, name).extend(first + row for row in getattr(result, name))
            whole.token_ids.extend(result.token_ids)
            first += len(result.token_ids)

        def tell() -> None:
            for each in done:
                each.result()

        return Done(whole, tell)

    def prepare(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def close(self) -> None:
        """Close all ranks."""
        for rank in self.ranks:
            rank.close()


class RanksDriver(Driver):
    """A `Driver` of the core of several attention ranks."""

    def __init__(self, capacity: Capacity, config: CoreConfig, *, overlap: int = 0, executor: Any = None) -> None:
        """Create the core for the ranks of `config`, each with the capacity."""
        super().__init__(capacity, executor=executor or FakeRanks(capacity, config.attention_ranks), overlap=overlap)
        self.whole = DataParallelScheduler(config, capacity)
        self.core = self.whole  # type: ignore[assignment]

    @property
    def slots(self) -> Sequence[int]:
        """Slots of the rows of all plans, in order."""
        return sorted({row.slot for plan in self.plans for row in plan.rows})

    def rank_of(self, wanted: TokenizedGenerateReqInput, source: str) -> int:
        """Return the rank that holds a request. Raise ValueError if none does."""
        held = [bool(core.roster.choices(source, wanted.rid)) for core in self.whole.cores]
        return held.index(True)

    def check(self) -> None:
        assert [each for core in self.whole.cores for each in violations(core)] == []

    def assert_empty(self) -> None:
        """Assert that no rank holds a request or memory."""
        for core in self.whole.cores:
            assert_empty(core)
