"""Causes of a redispatch."""

from enum import StrEnum


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
