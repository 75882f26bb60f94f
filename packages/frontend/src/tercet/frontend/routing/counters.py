"""What a frontend has counted since it started, for /server_info and /metrics."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tercet.frontend.manager.latency import LatencyMeasures
from tercet.protocol.messages.values import Role


class Cause(StrEnum):
    """Why a request was dispatched again."""

    SCHEDULER_DIED = "scheduler_died"
    SCHEDULER_LEFT = "scheduler_left"
    SCHEDULER_STUCK = "scheduler_stuck"
    DETOKENIZER_DIED = "detokenizer_died"
    DETOKENIZER_LEFT = "detokenizer_left"
    DETOKENIZER_STUCK = "detokenizer_stuck"
    DRAINING = "draining"
    """Its scheduler or detokenizer is about to leave, and there is another."""
    GAP = "gap"
    """Tokens came from beyond the next position."""
    ABSENT = "absent"
    """Its scheduler does not hold it, and nothing came."""
    SILENT = "silent"
    """Its scheduler is ahead, and nothing came."""
    ABORTED = "aborted"
    """Its scheduler ended it on behalf of an earlier attempt."""
    REFUSED = "refused"


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
