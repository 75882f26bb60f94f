"""Executor that calls back when it has loaded other weights."""

from collections.abc import Callable

from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.ports import AdapterReader, Executor, GrammarReader, LateMasks, Pending, WeightsReader


class _Announced:
    """A submitted plan that loads weights."""

    def __init__(self, pending: Pending[StepResult], announce: Callable[[], None]) -> None:
        self._pending = pending
        self._announce = announce

    def result(self) -> StepResult:
        """Wait until the weights are loaded, and call back before the core sees the result, unless loading failed."""
        result = self._pending.result()
        if not result.fault:
            self._announce()
        return result


class AnnouncingExecutor:
    """Wrapper of an executor that calls `announce` with the directory of each plan's loaded weights."""

    def __init__(self, executor: Executor, announce: Callable[[str], None]) -> None:
        self._executor = executor
        self._announce = announce

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    @property
    def grammars(self) -> GrammarReader | None:
        return self._executor.grammars

    @property
    def late_masks(self) -> LateMasks | None:
        return self._executor.late_masks

    @property
    def adapters(self) -> AdapterReader | None:
        return self._executor.adapters

    @property
    def weights(self) -> WeightsReader:
        return self._executor.weights

    def submit(self, plan: Plan) -> Pending[StepResult]:
        pending = self._executor.submit(plan)
        return _Announced(pending, lambda: self._announce(plan.weights)) if plan.weights else pending

    def prepare(self) -> bool:
        return self._executor.prepare()

    def close(self) -> None:
        self._executor.close()
