"""Requests whose scheduler or detokenizer died go on elsewhere, from the token they had got to.

A scheduler that takes over gets the ids emitted so far, a detokenizer the number of characters: no token is lost or
repeated. A request that finds no eligible part waits for one, `timeout` seconds at the most; new ones wait likewise, as
long as they are few.

A request may be what its scheduler died of. One whose attempt died without a token is suspect; after two such deaths it
runs while nothing else does, and one such request at a time, so that the next death has one culprit, which ends there.
Other frontends have suspects of their own: a scheduler holds such a request until nothing else runs there, offers to
run it, and starts it when this frontend has heard that. Only then is a death that request's.
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
"""Deaths without a token after which a request runs alone."""
MOST_SUSPICIONS = 6
"""Deaths without a token after which a request is given up even if no scheduler ever offered to run it alone."""
OFFER_PATIENCE = 5.0
"""Seconds without that offer, which may have got lost, before it is asked for again."""
OTHER_WAYS = 2
"""Dispatches to the same scheduler, by other detokenizers if there are any, before another scheduler is tried."""
_BY_ANOTHER_WAY = frozenset({Cause.GAP, Cause.ABSENT, Cause.SILENT})
"""Where the detokenizer may be at fault."""


class Recovery:
    """Dispatches what has no route. `now` is any monotonic clock in seconds."""

    def __init__(self, dispatcher: Dispatcher, redispatches: Counter[Cause], timeout: float, max_waiting: int) -> None:
        self._dispatcher = dispatcher
        self._redispatches = redispatches
        self._timeout = timeout
        self._max_waiting = max_waiting
        self._waiting: dict[str, tuple[RequestState, float]] = {}
        self._alone: RequestState | None = None
        """The last request that was dispatched to run alone."""

    def __len__(self) -> int:
        return len(self._waiting)

    def first(self, state: RequestState, now: float) -> bool:
        """Dispatch a new request, or let it wait. False when too many wait already."""
        if self._dispatch(state, now):
            return True
        if sum(each.attempt < 0 for each, _ in self._waiting.values()) >= self._max_waiting:
            return False
        self.later(state, now)
        return True

    def scheduler_lost(self, peer: str, states: Iterable[RequestState], now: float, cause: Cause) -> None:
        """A scheduler is gone or stuck. Unless it left on purpose, what had no token from it yet is suspect."""
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
        """A detokenizer is gone or stuck: every request routed through it takes another."""
        for state in [state for state in states if state.detokenizer == peer and not state.done]:
            if state.rid not in self._waiting:
                self.again(state, now, cause)

    def move(self, states: Iterable[RequestState], now: float) -> None:
        """Take requests away from a part that is leaving, if somebody else has them; else it finishes them."""
        for state in list(states):
            if not state.done and state.rid not in self._waiting and self._dispatch(state, now):
                self._redispatches[Cause.DRAINING] += 1

    def again(self, state: RequestState, now: float, cause: Cause) -> None:
        """Dispatch a request again, or keep it until that is possible. Without any news for too long it is ended."""
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
        """A scheduler runs nothing else: the request that it holds may start."""
        state.offered_by = state.scheduler
        if not self._dispatch(state, now):
            state.offered_by = ""  # which has it asked for again

    def later(self, state: RequestState, now: float) -> None:
        """Keep a request for the next `retry`."""
        self._waiting.setdefault(state.rid, (state, now + self._timeout))

    def retry(self, now: float) -> None:
        """Try everything that waits: what is not suspect first, then the oldest. What waited too long ends in an error.

        Called when a part gets ready, and now and then.
        """
        if self._alone is not None and self._awaits_offer(self._alone, now):
            self._dispatch(self._alone, now)
        for state, deadline in sorted(self._waiting.values(), key=lambda each: (each[0].suspicions, each[1])):
            if state.done or self._dispatch(state, now):
                del self._waiting[state.rid]
            elif self._in_line(state):
                self._waiting[state.rid] = state, now + self._timeout  # its own wait begins when its turn has come
            elif now >= deadline:
                del self._waiting[state.rid]
                state.fail(_timed_out(state))

    def forget(self, state: RequestState) -> None:
        """The client is gone."""
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
        """Whether a request has to run alone, and waits until the one that does so now has shown to be harmless."""
        other = self._alone
        if state.suspicions < SUSPICIONS or other is None or other is state:
            return False
        return not other.done and other.alone and not other.has_progressed and bool(other.scheduler)

    def _awaits_offer(self, state: RequestState, now: float) -> bool:
        """For too long already."""
        held = state.alone and state.scheduler and not (state.offered_by or state.done or state.has_progressed)
        return bool(held) and now >= state.dispatched_at + OFFER_PATIENCE

    def _suspect(self, state: RequestState, *, alone: bool) -> None:
        state.suspicions += 1
        if alone or state.suspicions >= MOST_SUSPICIONS:
            logger.error("%s is given up: schedulers die of it; its fingerprint is %s", state.rid, fingerprint(state))
            state.fail(DeadlyRequestError("The server failed repeatedly while it ran this request."))


def fingerprint(state: RequestState) -> str:
    """Tells a request again that comes again: by its input ids and sampling, not by its seed."""
    return hashlib.sha256(state.prompt_ids + state.signature).hexdigest()[:16]


def _timed_out(state: RequestState) -> ServerError | UnavailableError:
    if state.output_tokens:
        return ServerError("The part of the server that ran this request died, and no other took over.")
    return UnavailableError("No part of the server took this request in time.", retry_after=1)
