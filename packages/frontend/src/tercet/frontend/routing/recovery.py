"""Redispatch of requests whose scheduler or detokenizer died, left or lost them.

The new scheduler gets the token ids emitted so far, the new detokenizer the number of characters, so no token is lost
or repeated. A request without an eligible scheduler waits for at most `timeout` seconds. New requests wait, too, up to
`max_waiting` of them.

A request can crash its scheduler. A crash counts against a request if the attempt had produced no token. After
`SUSPICIONS` such crashes the request runs exclusively, one such request at a time, so that the next crash has a single
culprit, which is failed. Other frontends may have such requests, too. Therefore a scheduler defers an exclusive request
until it runs nothing else, offers to run it, and starts it once this frontend has confirmed. Only then is a crash
blamed on the request.
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

SUSPICIONS = 2
"""Crashes without a token after which a request runs exclusively."""
MOST_SUSPICIONS = 6
"""Crashes without a token after which a request fails even if no scheduler offered to run it exclusively."""
OFFER_PATIENCE = 5.0
"""Seconds to wait for the offer of a scheduler, which may be lost, before requesting it again."""
OTHER_WAYS = 2
"""Redispatches to the same scheduler, through other detokenizers if possible, before another scheduler is tried."""
_BY_ANOTHER_WAY = frozenset({Cause.GAP, Cause.ABSENT, Cause.SILENT})
"""Causes for which the detokenizer may be at fault."""


class Recovery:
    """Queue of requests that have no route, and the redispatch of lost ones. `now` is monotonic, in seconds."""

    def __init__(self, dispatcher: Dispatcher, redispatches: Counter[Cause], timeout: float, max_waiting: int) -> None:
        self._dispatcher = dispatcher
        self._redispatches = redispatches
        self._timeout = timeout
        self._max_waiting = max_waiting
        self._waiting: dict[str, tuple[RequestState, float]] = {}
        self._alone: RequestState | None = None
        """Latest request that was dispatched exclusively."""

    def __len__(self) -> int:
        return len(self._waiting)

    def first(self, state: RequestState, now: float) -> bool:
        """Dispatch or enqueue a new request. Return False if too many wait already."""
        if self._dispatch(state, now):
            return True
        if sum(each.attempt < 0 for each, _ in self._waiting.values()) >= self._max_waiting:
            return False
        self.later(state, now)
        return True

    def scheduler_lost(self, peer: str, states: Iterable[RequestState], now: float, cause: Cause) -> None:
        """Redispatch the requests of a scheduler that is gone or stuck.

        Unless it left on purpose, a crash counts against those without a token from it.
        """
        lost = [state for state in states if state.scheduler == peer and not state.done]
        if lost:
            logger.warning("%s: %s with %d requests in flight: dispatching them again", peer, cause, len(lost))
        for state in lost:
            state.scheduler = ""
            if cause is not Cause.SCHEDULER_LEFT and not state.has_progressed:
                self._suspect(state, alone=state.offered_by == peer)
            state.offered_by = ""
        for state in sorted(lost, key=lambda each: each.suspicions):
            if not state.done:
                self.again(state, now, cause)

    def detokenizer_lost(self, peer: str, states: Iterable[RequestState], now: float, cause: Cause) -> None:
        """Redispatch the requests of a detokenizer that is gone or stuck."""
        for state in [state for state in states if state.detokenizer == peer and not state.done]:
            if state.rid not in self._waiting:
                self.again(state, now, cause)

    def move(self, states: Iterable[RequestState], now: float) -> None:
        """Redispatch the requests of a draining peer where another one is available; the others finish there."""
        for state in list(states):
            if not state.done and state.rid not in self._waiting and self._dispatch(state, now):
                self._redispatches[Cause.DRAINING] += 1

    def again(self, state: RequestState, now: float, cause: Cause) -> None:
        """Redispatch or enqueue a request. Fail it if it has had no output for too long."""
        self._redispatches[cause] += 1
        if cause in {Cause.ABSENT, Cause.SILENT}:
            state.retries += 1
            if state.retries > OTHER_WAYS:
                state.unheard_at.add(state.scheduler)
        if cause in _BY_ANOTHER_WAY:
            state.offered_by = ""
            first, last = state.unheard or (now, now)
            state.unheard = first if now < last + self._timeout else now, now
            if now >= state.unheard[0] + self._timeout:
                state.fail(_timed_out(state))
                return
        if self._dispatch(state, now, other_detokenizer=cause in _BY_ANOTHER_WAY):
            self._waiting.pop(state.rid, None)
        else:
            self.later(state, now)

    def offered(self, state: RequestState, now: float) -> None:
        """Start a deferred exclusive request whose scheduler runs nothing else."""
        state.offered_by = state.scheduler
        if not self._dispatch(state, now):
            state.offered_by = ""  # the offer is requested again

    def later(self, state: RequestState, now: float) -> None:
        """Keep a request for the next `retry`."""
        self._waiting.setdefault(state.rid, (state, now + self._timeout))

    def retry(self, now: float) -> None:
        """Dispatch waiting requests: those without crashes first, then the oldest. Fail those that waited too long.

        Called when a peer becomes ready, and periodically.
        """
        if self._alone is not None and self._awaits_offer(self._alone, now):
            self._dispatch(self._alone, now)
        for state, deadline in sorted(self._waiting.values(), key=lambda each: (each[0].suspicions, each[1])):
            if state.done or self._dispatch(state, now):
                del self._waiting[state.rid]
            elif self._in_line(state):
                self._waiting[state.rid] = state, now + self._timeout  # its own timeout begins when it is first in line
            elif now >= deadline:
                del self._waiting[state.rid]
                state.fail(_timed_out(state))

    def forget(self, state: RequestState) -> None:
        self._waiting.pop(state.rid, None)
        if self._alone is state:
            self._alone = None

    def _dispatch(self, state: RequestState, now: float, *, other_detokenizer: bool = False) -> bool:
        if self._in_line(state):
            return False
        alone = state.suspicions >= SUSPICIONS
        if not self._dispatcher.dispatch(state, now, alone=alone, other_detokenizer=other_detokenizer):
            return False
        if alone:
            self._alone = state
        return True

    def _in_line(self, state: RequestState) -> bool:
        """Return whether an exclusive request has to wait because the running one has produced no token yet."""
        other = self._alone
        if state.suspicions < SUSPICIONS or other is None or other is state:
            return False
        return not other.done and other.alone and not other.has_progressed and bool(other.scheduler)

    def _awaits_offer(self, state: RequestState, now: float) -> bool:
        """Return whether the offer for a deferred request is overdue."""
        held = state.alone and state.scheduler and not (state.offered_by or state.done or state.has_progressed)
        return bool(held) and now >= state.dispatched_at + OFFER_PATIENCE

    def _suspect(self, state: RequestState, *, alone: bool) -> None:
        state.suspicions += 1
        if alone or state.suspicions >= MOST_SUSPICIONS:
            logger.error("%s is given up: schedulers die of it; its fingerprint is %s", state.rid, fingerprint(state))
            state.fail(DeadlyRequestError("The server failed repeatedly while it ran this request."))


def fingerprint(state: RequestState) -> str:
    """Return a hash of input ids and sampling parameters without the seed, equal for repeated requests."""
    return hashlib.sha256(state.prompt_ids + state.signature).hexdigest()[:16]


def _timed_out(state: RequestState) -> ServerError | UnavailableError:
    if state.output_tokens:
        return ServerError("The part of the server that ran this request died, and no other took over.")
    return UnavailableError("No part of the server took this request in time.", retry_after=1)
