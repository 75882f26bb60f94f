"""Injection of one fault into one part under load, and its effects."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence

import pytest

from tests.chaos.conftest import References, Table
from tests.chaos.load import Job, Load, Outcome, quantile
from tests.chaos.output_check import OutputCheck, Verdict
from tests.chaos.parts import Parts, assert_nothing_is_left

TRIES = 3
"""Loads to try until a fault hits requests."""


class FaultInjection:
    """A load, and a signal to the busiest part of a role. The supervisor replaces a part that dies or hangs."""

    def __init__(
        self,
        parts: Parts,
        role: str,
        number: signal.Signals = signal.SIGKILL,
        make_load: Callable[[str], Load] = Load,
    ) -> None:
        self.parts = parts
        self.role = role
        self.name = ""
        """Name of the part that was hit."""
        self.number = number
        self._make_load = make_load
        self.renew()
        self.injected_at = 0.0
        self.restart_seconds = 0.0

    def renew(self) -> None:
        """Begin another load."""
        self.load = self._make_load(self.parts.server.url)

    async def run(self, jobs: Sequence[Job], chance: random.Random) -> list[Outcome]:
        """Run the jobs, and inject the fault in the middle."""
        tokens = sum(job.length * job.n for job in jobs if job.streamed)
        return await self.load.run(jobs, lambda: self._inject(chance.randrange(tokens // 8, tokens // 2)))

    async def _inject(self, tokens: int) -> None:
        await self.load.until(lambda: self.load.tokens >= tokens and self._others_serve())
        self.name = self.parts.busiest(self.role)
        self.injected_at = time.monotonic()
        await self._apply()

    async def _apply(self) -> None:
        self.restart_seconds = await self.parts.replaced(self.name, self.parts.signal(self.name, self.number))

    def _others_serve(self) -> bool:
        """Return False if the fault is for a frontend and fewer than two frontends have streams."""
        serving = {each.frontend for each in self.load.outcomes if each.arrivals and not each.ended}
        return self.role != "frontend" or len(serving) > 1

    def figures(self, resumed: int, verdict: Verdict) -> str:
        """Return a line for the table."""
        stalls = self._stalls()
        failed = len(failures(self.load.outcomes))
        return (
            f"{len(self.load.outcomes)} requests, {failed} failed, {len(stalls)} streams under way, {resumed} resumed; "
            f"stall p50 {quantile(stalls, 0.5):.2f} s, p99 {quantile(stalls, 0.99):.2f} s; all move again after "
            f"{self.stalled:.2f} s; ready again after {self.restart_seconds:.2f} s; "
            f"{verdict.ties} ties in {verdict.texts} texts; load average {os.getloadavg()[0]:.1f}"
        )

    @property
    def stalled(self) -> float:
        """Seconds until every running stream continued."""
        return max(self._stalls(), default=0.0)

    def _stalls(self) -> list[float]:
        return [each.stall(self.injected_at) for each in self.load.outcomes if each.under_way(self.injected_at)]


def machine_load() -> float:
    """Return the slow-down of this machine by its load, at least 1."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def assert_nothing_is_lost(
    parts: Parts,
    references: References,
    table: Table,
    fault: FaultInjection,
    jobs: Sequence[Job],
    chance: random.Random,
    *,
    enough: int = 2,
) -> None:
    """Assert that every request finishes with its reference output and that nothing is left behind.

    The busiest part is known from heartbeats, and may be idle by then: a fault that hits no request is injected again.
    """
    expected = await references.of(parts.server.url, jobs)
    for _ in range(TRIES):
        fault.renew()
        before = await parts.resumed()
        outcomes = await fault.run(jobs, chance)
        assert failures(outcomes) == []
        resumed = await parts.resumed() - before
        verdict = OutputCheck(parts.server.url, expected).compare(outcomes)
        table.add(fault.figures(resumed, verdict))
        assert verdict.ties <= max(1, verdict.texts // 500)
        assert_nothing_is_left(await parts.idle())
        if resumed >= enough:
            return
    pytest.fail(f"fewer than {enough} requests were hit in {TRIES} loads")


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"{each.job.number}: {each.error}" for each in outcomes if not each.finished]
