"""Counters of one frontend, for /server_info and /metrics."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tercet.frontend.manager.latency import LatencyMeasures
from tercet.frontend.routing.cause import Cause
from tercet.protocol.messages.values import Role


class RequestOutcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"
    FAILED = "failed"


class Exchange(NamedTuple):
    """What a client asked for, and how it was answered."""

    method: str
    route: str
    """As the router has it, so that there are as many as there are routes."""
    status: int


@dataclass
class Counters:
    """Only ever grow. They are this process's own: several frontends add up."""

    redispatches: Counter[Cause] = field(default_factory=Counter)
    deaths: Counter[Role] = field(default_factory=Counter)
    """Schedulers and detokenizers that were lost without having said that they leave."""
    outcomes: Counter[RequestOutcome] = field(default_factory=Counter)
    resumed_finished: int = 0
    """Requests that were dispatched more than once, and finished."""
    over_limit: int = 0
    """Requests turned away because their API key had too many in flight."""
    exchanges: Counter[Exchange] = field(default_factory=Counter)
    models: defaultdict[str, LatencyMeasures] = field(default_factory=lambda: defaultdict(LatencyMeasures))
    """By the first name each model is served by."""
