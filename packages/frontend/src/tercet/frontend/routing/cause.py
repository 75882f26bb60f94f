"""Causes of a redispatch."""

from enum import StrEnum


class Cause(StrEnum):
    """Reason for a redispatch of a request."""

    SCHEDULER_DIED = "scheduler_died"
    SCHEDULER_LEFT = "scheduler_left"
    SCHEDULER_STUCK = "scheduler_stuck"
    DETOKENIZER_DIED = "detokenizer_died"
    DETOKENIZER_LEFT = "detokenizer_left"
    DETOKENIZER_STUCK = "detokenizer_stuck"
    DRAINING = "draining"
    """Its scheduler or detokenizer is draining, and another one took it."""
    GAP = "gap"
    """Tokens arrived for a position beyond the next one."""
    ABSENT = "absent"
    """Its scheduler does not hold it, and no output arrived."""
    SILENT = "silent"
    """Its scheduler holds it at a later position, and no output arrived."""
    ABORTED = "aborted"
    """Its scheduler ended it for an abort of an earlier attempt."""
    REFUSED = "refused"
