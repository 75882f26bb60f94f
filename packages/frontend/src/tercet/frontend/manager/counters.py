"""Counters of one frontend, for /server_info and /metrics."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tercet.frontend.manager.latency import LatencyMeasures
from tercet.frontend.routing.cause import Cause
from tercet.protocol.messages.values import Role


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
