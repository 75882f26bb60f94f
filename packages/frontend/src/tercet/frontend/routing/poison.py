"""Poison requests: requests that crash the scheduler that runs them.

A crash counts against a request if the attempt had produced no token. After `CRASHES_UNTIL_EXCLUSIVE` such crashes the
request runs exclusively, one such request at a time, so that the next crash has a single culprit, which is failed.
Other frontends may have such requests, too. Therefore a scheduler defers an exclusive request until it runs nothing
else, offers to run it, and starts it once this frontend has confirmed. Only then is a crash blamed on the request.
"""

import hashlib
import logging

from tercet.frontend.errors import DeadlyRequestError
from tercet.frontend.routing.request_state import RequestState

logger = logging.getLogger(__name__)

CRASHES_UNTIL_EXCLUSIVE = 2
"""Crashes without a token after which a request runs exclusively."""
MAX_CRASHES = 6
"""Crashes without a token after which a request fails even if no scheduler offered to run it exclusively."""
OFFER_TIMEOUT = 5.0
"""Seconds to wait for the offer of a scheduler, which may be lost, before requesting it again."""


class PoisonRules:
    """Rules for requests that crashed schedulers, and the latest of them that was dispatched exclusively."""

    def __init__(self) -> None:
        self._exclusive: RequestState | None = None

    def must_be_exclusive(self, state: RequestState) -> bool:
        """Return whether a request has crashed too many schedulers to run beside others."""
        return state.crash_count >= CRASHES_UNTIL_EXCLUSIVE

    def blocks(self, state: RequestState) -> bool:
        """Return whether an exclusive request has to wait because the running one has produced no token yet."""
        other = self._exclusive
        if not self.must_be_exclusive(state) or other is None or other is state:
            return False
        return not other.done and other.exclusive and not other.has_progressed and bool(other.scheduler)

    def on_dispatched(self, state: RequestState) -> None:
        if state.exclusive:
            self._exclusive = state

    def without_offer(self, now: float) -> RequestState | None:
        """Return the deferred request if the offer of its scheduler is overdue."""
        state = self._exclusive
        if state is None or not (state.exclusive and state.scheduler):
            return None
        waits = not (state.offered_by or state.done or state.has_progressed)
        return state if waits and now >= state.dispatched_at + OFFER_TIMEOUT else None

    def on_crash(self, state: RequestState, scheduler: str) -> None:
        """Count the crash of a scheduler against its request, unless that has progressed. Fail a certain culprit."""
        if state.has_progressed:
            return
        state.crash_count += 1
        if state.offered_by == scheduler or state.crash_count >= MAX_CRASHES:
            logger.error(
                "request failed, schedulers crash while they run it rid=%s fingerprint=%s",
                state.rid,
                fingerprint(state),
            )
            state.fail(DeadlyRequestError("The server failed repeatedly while it ran this request."))

    def forget(self, state: RequestState) -> None:
        if self._exclusive is state:
            self._exclusive = None


def fingerprint(state: RequestState) -> str:
    """Return a hash of input ids and sampling parameters without the seed, equal for repeated requests."""
    return hashlib.sha256(state.prompt_ids + state.signature).hexdigest()[:16]
