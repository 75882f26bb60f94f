"""What a frontend has counted since it started, for /server_info and /metrics."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from tercet.protocol.values import Role

FIRST_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Seconds."""


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


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    CLIENT_GONE = "client_gone"
    REFUSED = "refused"
    FAILED = "failed"


class Histogram:
    """Observations by upper bound; the last bucket has none."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.buckets = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """One more."""
        self.buckets[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class Counters:
    """Only ever grow. They are this process's own: several frontends add up."""

    redispatches: Counter[Cause] = field(default_factory=Counter)
    deaths: Counter[Role] = field(default_factory=Counter)
    """Schedulers and detokenizers that were lost without having said that they leave."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    resumed_finished: int = 0
    """Requests that were dispatched more than once, and finished."""
    over_limit: int = 0
    """Requests turned away because their API key had too many in flight."""
    first_token: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_BOUNDS))
