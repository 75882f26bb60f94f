"""The scheduler's ports: what its loop needs of an executor. Adapters are chosen in `wiring`."""

from typing import Protocol

from tercet.scheduler.core.plan import Capacity, Plan, StepResult


class Pending(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Wait for the step. Raises what the forward raised."""
        ...


class Executor(Protocol):
    """Runs plans in the order they are submitted."""

    @property
    def capacity(self) -> Capacity:
        """Fixed once the executor is built."""
        ...

    def submit(self, plan: Plan) -> Pending:
        """Start a step; it may still be running when this returns."""
        ...

    def close(self) -> None:
        """Free devices and peers."""
        ...
