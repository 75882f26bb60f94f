"""Reports of requests that ended, such as log lines and spans. They run after the response and harm no request."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from tercet.frontend.http.auth import current_caller
from tercet.frontend.http.loop_turns import LoopTurns
from tercet.frontend.manager.counters import TelemetryFailures
from tercet.frontend.routing.request_state import RequestState

MOST_RUNNING = 1024
"""Reports that may run or wait for a turn. Further ones are left out."""


class EndedRequest(NamedTuple):
    """Request that ended, with its prompts that were dispatched or waited. Times are those of the request table."""

    states: Sequence[RequestState]
    admitted_at: float
    ended_at: float
    unix_time: float
    """Unix time of `ended_at`."""
    owner: str
    """API key, for turns of the event loop."""


Report = Callable[[EndedRequest, LoopTurns], Awaitable[None]]
"""Report of one request. It waits for a turn before each piece of work, since a request may have 2,048 prompts."""


class RequestReports:
    """Reports of each request, in tasks of their own. Failures are counted and logged."""

    def __init__(self, turns: LoopTurns, failures: TelemetryFailures) -> None:
        self._turns = turns
        self._failures = failures
        self._reports: list[Report] = []
        self._running: set[asyncio.Task[None]] = set()

    def add(self, report: Report) -> None:
        """Run this report for each request that ends from now on."""
        self._reports.append(report)

    def start(self, states: Sequence[RequestState], admitted_at: float, clock: Callable[[], float]) -> None:
        """Start the reports of a request that ended. The current task's context is theirs, too."""
        if not self._reports:
            return
        if len(self._running) >= MOST_RUNNING:
            self._failures.add(f"request reports: left out, too many wait: limit={MOST_RUNNING}")
            return
        ended = EndedRequest(states, admitted_at, clock(), time.time(), current_caller().owner)
        task = asyncio.create_task(self._run(ended))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def close(self) -> None:
        """Wait for the reports that run."""
        await asyncio.gather(*self._running)

    async def _run(self, ended: EndedRequest) -> None:
        for report in self._reports:
            try:
                await report(ended, self._turns)
            except Exception as error:  # the request has its answer
                self._failures.add(f"request reports: failed: error={error!r}")
