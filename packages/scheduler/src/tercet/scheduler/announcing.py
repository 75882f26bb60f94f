"""An executor that says so when it has loaded other weights."""

from collections.abc import Callable

from tercet.scheduler.core.plan import Capacity, Plan, StepResult
from tercet.scheduler.ports import AdapterReader, Executor, GrammarReader, LateMasks, Pending, WeightsReader


class _Announced:
    """A plan that loads weights."""

    def __init__(self, pending: Pending[StepResult], announce: Callable[[], None]) -> None:
        self._pending = pending
        self._announce = announce

    def result(self) -> StepResult:
        """Wait until they are loaded, and say so before the core does; not where loading failed."""
        result = self._pending.result()
        if not result.fault:
            self._announce()
        return result


class AnnouncingExecutor:
    """Another executor, and a call for each plan that has loaded weights, with their directory."""

    def __init__(self, executor: Executor, announce: Callable[[str], None]) -> None:
        self._executor = executor
        self._announce = announce

    @property
    def capacity(self) -> Capacity:
        """As the executor says, as all that follows."""
        return self._executor.capacity

    @property
    def grammars(self) -> GrammarReader | None:
        """Where grammars are read."""
        return self._executor.grammars

    @property
    def late_masks(self) -> LateMasks | None:
        """Who tells when choices whose masks were late can go on."""
        return self._executor.late_masks

    @property
    def adapters(self) -> AdapterReader | None:
        """Where adapters are read."""
        return self._executor.adapters

    @property
    def weights(self) -> WeightsReader:
        """Who looks at weights."""
        return self._executor.weights

    def submit(self, plan: Plan) -> Pending[StepResult]:
        """Pass a plan on."""
        pending = self._executor.submit(plan)
        return _Announced(pending, lambda: self._announce(plan.weights)) if plan.weights else pending

    def prepare(self) -> bool:
        """Pass it on."""
        return self._executor.prepare()

    def close(self) -> None:
        """Pass it on."""
        self._executor.close()
