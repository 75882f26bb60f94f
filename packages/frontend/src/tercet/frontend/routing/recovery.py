"""Redispatch of requests whose scheduler or detokenizer died, left or lost them.

The new scheduler gets the token ids emitted so far, the new detokenizer the number of characters, so no token is lost
or repeated. A request without an eligible scheduler waits for at most `timeout` seconds. New requests wait, too, up to
`max_waiting` of them.

A request can crash its scheduler. A crash counts against a request if the attempt had produced no token. After
`CRASHES_UNTIL_EXCLUSIVE` such crashes the request runs exclusively, one such request at a time, so that the next crash
has a single culprit, which is failed. Other frontends may have such requests, too. Therefore a scheduler defers an
exclusive request until it runs nothing else, offers to run it, and starts it once this frontend has confirmed. Only
then is a crash blamed on the request.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable

from tercet.frontend.errors import DeadlyRequestError, ServerError, UnavailableError
from tercet.frontend.routing.cause import Cause
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.request_state import RequestState

logger = logging.getLogger(__name__)

CRASHES_UNTIL_EXCLUSIVE = 2
"""Crashes without a token after which a request runs exclusively."""
MAX_CRASHES = 6
"""Crashes without a token after which a request fails even if no scheduler offered to run it exclusively."""
OFFER_TIMEOUT = 5.0
"""Seconds to wait for the offer of a scheduler, which may be lost, before requesting it again."""
RETRIES_PER_SCHEDULER = 2
"""Redispatches to the same scheduler, through other detokenizers if possible, before another scheduler is tried."""
_OTHER_DETOKENIZER = frozenset({Cause.GAP, Cause.ABSENT, Cause.SILENT})
"""Causes for which the detokenizer may be at fault."""


class Recovery:
    """Queue of requests that have no route, and the redispatch of lost ones. `now` is monotonic, in seconds."""

    def __init__(self, dispatcher: Dispatcher, redispatches: Counter[Cause], timeout: float, max_waiting: int) -> None:
        self._dispatcher = dispatcher
        self._redispatches = redispatches
        self._timeout = timeout
        self._max_waiting = max_waiting
        self._waiting: dict[str, tuple[RequestState, float]] = {}
        self._exclusive: RequestState | None = None
        """Latest request that was dispatched exclusively."""

    def __len__(self) -> int:
        return len(self._waiting)

    def submit(self, state: RequestState, now: float) -> bool:
        """Dispatch or enqueue a new request. Return False if too many wait already."""
        if self._dispatch(state, now):
            return True
        if sum(each.attempt < 0 for each, _ in self._waiting.values()) >= self._max_waiting:
            return False
        self.enqueue(state, now)
        return True

    def scheduler_lost(self, peer: str, states: Iterable[RequestState], now: float, cause: Cause) -> None:
        """Redispatch the requests of a scheduler that is gone or stuck.

        Unless it left on purpose, a crash counts against those without a token from it.
        """
        lost = [state for state in states if state.scheduler == peer and not state.done]
        if lost:
            logger.warning("%s: lost, redispatching its requests cause=%s requests=%d", peer, cause, len(lost))
        for state in lost:
            state.scheduler = ""
            if cause is not Cause.SCHEDULER_LEFT and not state.has_progressed:
                self._count_crash(state, exclusive=state.offered_by == peer)
            state.offered_by = ""
        for state in sorted(lost, key=lambda each: each.crash_count):
            if not state.done:
                self.redispatch(state, now, cause)

    def detokenizer_lost(self, peer: str, states: Iterable[RequestState], now: float, cause: Cause) -> None:
        """Redispatch the requests of a detokenizer that is gone or stuck."""
        for state in [state for state in states if state.detokenizer == peer and not state.done]:
            if state.rid not in self._waiting:
                self.redispatch(state, now, cause)

    def redispatch_draining(self, states: Iterable[RequestState], now: float) -> None:
        """Redispatch the requests of a draining peer where another one is available; the others finish there."""
        for state in list(states):
            if not state.done and state.rid not in self._waiting and self._dispatch(state, now):
                self._redispatches[Cause.DRAINING] += 1

    def redispatch(self, state: RequestState, now: float, cause: Cause) -> None:
        """Redispatch or enqueue a request. Fail it if it has had no output for too long."""
        self._redispatches[cause] += 1
        if cause in {Cause.ABSENT, Cause.SILENT}:
            state.retries += 1
            if state.retries > RETRIES_PER_SCHEDULER:
                state.stalled_at.add(state.scheduler)
        if cause in _OTHER_DETOKENIZER:
            state.offered_by = ""
            first, last = state.stalled_since or (now, now)
            state.stalled_since = first if now < last + self._timeout else now, now
            if now >= state.stalled_since[0] + self._timeout:
                state.fail(_timed_out(state))
                return
        if self._dispatch(state, now, other_detokenizer=cause in _OTHER_DETOKENIZER):
            self._waiting.pop(state.rid, None)
        else:
            self.enqueue(state, now)

    def grant_exclusive(self, state: RequestState, now: float) -> None:
        """Start a deferred exclusive request whose scheduler runs nothing else."""
        state.offered_by = state.scheduler
        if not self._dispatch(state, now):
            state.offered_by = ""  # the offer is requested again

    def enqueue(self, state: RequestState, now: float) -> None:
        """Keep a request for the next `retry`."""
        self._waiting.setdefault(state.rid, (state, now + self._timeout))

    def retry(self, now: float) -> None:
        """Dispatch waiting requests: those without crashes first, then the oldest. Fail those that waited too long.

        Called when a peer becomes ready, and periodically.
        """
        if self._exclusive is not None and self._offer_overdue(self._exclusive, now):
            self._dispatch(self._exclusive, now)
        for state, deadline in sorted(self._waiting.values(), key=lambda each: (each[0].crash_count, each[1])):
            if state.done or self._dispatch(state, now):
                del self._waiting[state.rid]
            elif self._blocked_by_exclusive(state):
                self._waiting[state.rid] = state, now + self._timeout  # its own timeout begins when it is first in line
            elif now >= deadline:
                del self._waiting[state.rid]
                state.fail(_timed_out(state))

    def forget(self, state: RequestState) -> None:
        self._waiting.pop(state.rid, None)
        if self._exclusive is state:
            self._exclusive = None

    def _dispatch(self, state: RequestState, now: float, *, other_detokenizer: bool = False) -> bool:
        if self._blocked_by_exclusive(state):
            return False
        exclusive = state.crash_count >= CRASHES_UNTIL_EXCLUSIVE
        if not self._dispatcher.dispatch(state, now, exclusive=exclusive, other_detokenizer=other_detokenizer):
            return False
        if exclusive:
            self._exclusive = state
        return True

    def _blocked_by_exclusive(self, state: RequestState) -> bool:
        """Return whether an exclusive request has to wait because the running one has produced no token yet."""
        other = self._exclusive
        if state.crash_count < CRASHES_UNTIL_EXCLUSIVE or other is None or other is state:
            return False
        return not other.done and other.exclusive and not other.has_progressed and bool(other.scheduler)

    def _offer_overdue(self, state: RequestState, now: float) -> bool:
        """Return whether the offer for a deferred request is overdue."""
        held = state.exclusive and state.scheduler and not (state.offered_by or state.done or state.has_progressed)
        return bool(held) and now >= state.dispatched_at + OFFER_TIMEOUT

    def _count_crash(self, state: RequestState, *, exclusive: bool) -> None:
        state.crash_count += 1
        if exclusive or state.crash_count >= MAX_CRASHES:
            logger.error(
                "request failed, schedulers crash while they run it rid=%s fingerprint=%s",
                state.rid,
                fingerprint(state),
            )
            state.fail(DeadlyRequestError("The server failed repeatedly while it ran this request."))


def fingerprint(state: RequestState) -> str:
    """Return a hash of input ids and sampling parameters without the seed, equal for repeated requests."""
    return hashlib.sha256(state.prompt_ids + state.signature).hexdigest()[:16]


def _timed_out(state: RequestState) -> ServerError | UnavailableError:
    if state.output_tokens:
        return ServerError("The part of the server that ran this request died, and no other took over.")
    return UnavailableError("No part of the server took this request in time.", retry_after=1)
