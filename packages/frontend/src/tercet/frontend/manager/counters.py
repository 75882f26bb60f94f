"""Counters of one frontend, and histograms per model, for /server_info and /metrics."""

import logging
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tercet.frontend.manager.req_state import OutputRow, ReqState
from tercet.frontend.routing.dispatcher import Cause
from tercet.frontend.routing.request_state import RequestState
from tercet.protocol.logging import RateLimitedLogger
from tercet.protocol.messages.messages import FirstTextRow
from tercet.protocol.messages.values import Exemplar, FinishType, Role

logger = logging.getLogger(__name__)

FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUEUE_BOUNDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BOUNDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 2.5, 5.0)
REQUEST_BOUNDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Bucket bounds in seconds."""
LENGTH_BOUNDS = tuple(float(1 << power) for power in range(21))
"""Bucket bounds in tokens."""
_FAILURE_INTERVAL = 60.0
"""Seconds between log lines about telemetry that failed."""


class RequestOutcome(StrEnum):
    """Final outcome of a request."""

    FINISHED = "finished"
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"
    FAILED = "failed"


class Exchange(NamedTuple):
    """HTTP method, route and response status, as a key for counting."""

    method: str
    route: str
    """Path template of the router, not the requested path, so the number of values is bounded."""
    status: int


class Histogram:
    """Histogram with upper bounds; the last bucket is unbounded."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """Latest traced value of each bucket."""

    def observe(self, value: float, times: int = 1, trace_id: str = "") -> None:
        """Add a value `times` times, and keep it as an example if its request is traced."""
        bucket = bisect_left(self.bounds, value)
        self.buckets[bucket] += times
        self.sum += value * times
        if trace_id:
            self.exemplars[bucket] = Exemplar(trace_id=trace_id, value=value, at=time.time())


@dataclass
class LatencyMeasures:
    """Histograms of one model since this frontend started. Only requests that end with an answer are observed."""

    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_BOUNDS))
    """Seconds from arrival at a scheduler to the first step, measured once per request."""
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
    """Seconds from the tokenized prompt to the first token of any choice."""
    between_tokens: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    """Seconds between tokens of a choice; tokens that arrive together share the interval equally."""
    request: Histogram = field(default_factory=lambda: Histogram(REQUEST_BOUNDS))
    """Seconds from the tokenized prompt to the last token of all choices, or to the vector of an input."""
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    output_tokens: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    """Tokens of all choices together."""
    finishes: Counter[FinishType] = field(default_factory=Counter)
    """Choices by finish reason."""

    def observe_row(self, state: ReqState, row: OutputRow, now: float) -> None:
        """Record an accepted row."""
        if row.opening is not None:
            self.observe_first_output(state, row.opening.queue_time, now, row.opening)
        count = len(row.token_ids)
        if count:
            choice = state.choices[row.index]
            if len(choice.token_ids) > count:
                self.between_tokens.observe((now - choice.last_token_at) / count, count)
            elif state.output_tokens == count:
                self.first_token.observe(now - state.started_at, trace_id=state.trace_id)
                state.first_token_at = now
            choice.last_token_at = now
        if row.finish is not None:
            self.finishes[row.finish.type] += 1
            self.observe_request(state, now)

    def observe_first_output(
        self, state: RequestState, queue_time: float | None, now: float, opening: FirstTextRow | None = None
    ) -> None:
        """Record the first output of a choice, or a vector.

        Queue time is measured once: that of later attempts and of other choices is not the request's. The times of a
        dispatch are those of its first choice with output.
        """
        dispatch = state.dispatches[-1]
        if dispatch.first_output_at is None:
            dispatch.first_output_at, dispatch.queue_time = now, queue_time
            if opening is not None:
                dispatch.chunks, dispatch.detokenize_seconds = opening.chunks, opening.detokenize_seconds
        if state.queue_time is None and queue_time is not None:
            state.queue_time = queue_time
            self.queue.observe(queue_time, trace_id=state.trace_id)

    def observe_request(self, state: RequestState, now: float) -> None:
        """Record the total latency and the lengths if the request is done and did not fail."""
        if state.done and state.error is None:
            state.ended_at = now
            self.request.observe(now - state.started_at, trace_id=state.trace_id)
            self.prompt_tokens.observe(state.prompt_tokens)
            if state.has_text:
                self.output_tokens.observe(state.output_tokens)


class TelemetryFailures:
    """Thread-safe counter of telemetry that failed, with at most one log line a minute."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()
        self._warnings = RateLimitedLogger(logger, _FAILURE_INTERVAL)

    def add(self, warning: str) -> None:
        """Count a failure, and log it unless one was logged within the last minute."""
        with self._lock:
            self.total += 1
            self._warnings.warn(warning, time.monotonic())


@dataclass
class Counters:
    """Monotonic counters of this process; totals over several frontends are sums."""

    redispatches: Counter[Cause] = field(default_factory=Counter)
    deaths: Counter[Role] = field(default_factory=Counter)
    """Schedulers and detokenizers lost without a goodbye."""
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter)
    resumed_finished: int = 0
    """Requests that were dispatched more than once and finished."""
    over_limit: int = 0
    """Requests rejected because their API key had too many in flight."""
    exchanges: Counter[Exchange] = field(default_factory=Counter)
    models: defaultdict[str, LatencyMeasures] = field(default_factory=lambda: defaultdict(LatencyMeasures))
    """Keyed by the first served name of the model."""
    telemetry_failures: TelemetryFailures = field(default_factory=TelemetryFailures)
