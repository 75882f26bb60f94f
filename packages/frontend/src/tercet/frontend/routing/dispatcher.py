"""`Dispatcher`: chooses a scheduler and a detokenizer for each request, sends it, and sends it again if they are lost.

When a request is sent again, the new scheduler gets the token ids emitted so far, the new detokenizer the number of
characters, so no token is lost or repeated. A request without an eligible scheduler waits for at most `timeout`
seconds. New requests wait, too, up to `max_waiting` of them.
"""

import logging
from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from tercet.frontend.errors import ServerError, UnavailableError
from tercet.frontend.routing.peers import DetokenizerPeer, PeerRegistry, SchedulerPeer
from tercet.frontend.routing.poison import PoisonRules
from tercet.frontend.routing.policies import ByContent, RoutingPolicy
from tercet.frontend.routing.request_state import RequestState
from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)

RETRIES_PER_SCHEDULER = 2
"""Redispatches to the same scheduler, through other detokenizers if possible, before another scheduler is tried."""


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


_OTHER_DETOKENIZER = frozenset({Cause.GAP, Cause.ABSENT, Cause.SILENT})
"""Causes for which the detokenizer may be at fault."""


class Dispatcher:
    """Sender of requests, and the queue of those that found no scheduler. `now` is monotonic, in seconds.

    Schedulers are chosen by `policy`, detokenizers in rotation.
    """

    def __init__(self, outbox: Sender, policy: RoutingPolicy, timeout: float = 60.0, max_waiting: int = 256) -> None:
        self.peers = PeerRegistry()
        self.redispatches = Counter[Cause]()
        self._outbox = outbox
        self._policy = policy
        self._encoders = ByContent()
        """Policy for encoders, which have no prefix cache."""
        self._timeout = timeout
        self._max_waiting = max_waiting
        self._waiting: dict[str, tuple[RequestState, float]] = {}
        """By rid: a request and the time at which it fails."""
        self._loads: dict[str, tuple[SchedulerPeer, int]] = {}
        """By rid: the scheduler of a request and its number of tokens at dispatch."""
        self._next_detokenizer = 0
        self._poison = PoisonRules()

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a scheduler or detokenizer."""
        return len(self._waiting)

    # Dispatch.

    def submit(self, state: RequestState, now: float) -> bool:
        """Dispatch or enqueue a new request. Return False if too many wait already."""
        if self._dispatch(state, now):
            return True
        if sum(each.attempt < 0 for each, _ in self._waiting.values()) >= self._max_waiting:
            return False
        self.enqueue(state, now)
        return True

    def _dispatch(
        self, state: RequestState, now: float, *, other_detokenizer: bool = False, cause: Cause | None = None
    ) -> bool:
        """Start the next attempt. Return False, without side effects, if it cannot start now.

        With `other_detokenizer` a detokenizer other than the present one is chosen, if there is one. `cause` is the
        reason why the present attempt, which runs, is replaced.
        """
        if self._poison.blocks(state):
            return False
        exclusive = self._poison.must_be_exclusive(state)
        detokenizer = ""
        if state.has_text:
            chosen = self.next_detokenizer(state.detokenizer if other_detokenizer else "")
            if chosen is None:
                return False
            detokenizer = chosen.peer
        for scheduler in self.candidates(state):
            deferred = exclusive and state.offered_by != scheduler.peer
            message = state.message(state.next_attempt, detokenizer, exclusive=exclusive, deferred=deferred)
            if self._outbox.send(scheduler.peer, message, *state.frames):
                if state.scheduler not in {"", scheduler.peer}:
                    self.abort(state, [], "went on elsewhere")
                self._add_load(state, scheduler)
                if cause is not None:
                    state.lost(cause, now)
                state.dispatched(scheduler.peer, detokenizer, now, exclusive=exclusive)
                self._poison.on_dispatched(state)
                return True
        return False

    def candidates(self, state: RequestState) -> list[SchedulerPeer]:
        """Return the schedulers to try, in order.

        Its present scheduler comes first, then the others in the policy's order, then those about to load other
        weights, and last those that rejected the request or held it without output.
        """
        eligible = self.peers.able_schedulers(state)
        if not eligible:
            return []
        ordered = (self._policy if state.has_text else self._encoders).order(state, eligible)
        deprioritized = state.refused_by | state.stalled_at
        return sorted(
            ordered, key=lambda each: (each.peer in deprioritized, each.load.updating, each.peer != state.scheduler)
        )

    def next_detokenizer(self, avoid: str = "") -> DetokenizerPeer | None:
        """Return the next detokenizer in rotation, avoiding `avoid` if possible; None without an eligible one."""
        eligible = self.peers.eligible_detokenizers()
        eligible = [each for each in eligible if each.peer != avoid] or eligible
        if not eligible:
            return None
        self._next_detokenizer += 1
        return eligible[(self._next_detokenizer - 1) % len(eligible)]

    def grant_exclusive(self, state: RequestState, now: float) -> None:
        """Start a deferred exclusive request whose scheduler runs nothing else."""
        state.offered_by = state.scheduler
        if not self._dispatch(state, now):
            state.offered_by = ""  # the offer is requested again

    # Redispatch.

    def redispatch(self, state: RequestState, now: float, cause: Cause) -> None:
        """Redispatch or enqueue a request. Fail it if it has had no output for too long."""
        self.redispatches[cause] += 1
        state.lost(cause, now)
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

    def on_scheduler_lost(self, peer: str, states: Iterable[RequestState], now: float, cause: Cause) -> None:
        """Redispatch the requests of a scheduler that is gone or stuck.

        Unless it left on purpose, a crash counts against those without a token from it.
        """
        lost = [state for state in states if state.scheduler == peer and not state.done]
        if lost:
            logger.warning("%s: lost, redispatching its requests cause=%s requests=%d", peer, cause, len(lost))
        for state in lost:
            state.scheduler = ""
            if cause is not Cause.SCHEDULER_LEFT:
                self._poison.on_crash(state, peer)
            state.offered_by = ""
        for state in sorted(lost, key=lambda each: each.crash_count):
            if not state.done:
                self.redispatch(state, now, cause)

    def on_detokenizer_lost(self, peer: str, states: Iterable[RequestState], now: float, cause: Cause) -> None:
        """Redispatch the requests of a detokenizer that is gone or stuck."""
        for state in [state for state in states if state.detokenizer == peer and not state.done]:
            if state.rid not in self._waiting:
                self.redispatch(state, now, cause)

    def on_draining(self, peer: str, states: Iterable[RequestState], now: float) -> None:
        """Redispatch the requests of a draining peer where another one is available; the others finish there."""
        for state in [state for state in states if peer in {state.scheduler, state.detokenizer}]:
            if not state.done and state.rid not in self._waiting and self._dispatch(state, now, cause=Cause.DRAINING):
                self.redispatches[Cause.DRAINING] += 1

    def forget_cache(self, scheduler: str) -> None:
        """Forget the contents of the cache of a scheduler that went down."""
        self._policy.on_peer_down(scheduler)

    # The queue.

    def enqueue(self, state: RequestState, now: float) -> None:
        """Keep a request for the next `retry`."""
        self._waiting.setdefault(state.rid, (state, now + self._timeout))

    def retry(self, now: float) -> None:
        """Dispatch waiting requests: those without crashes first, then the oldest. Fail those that waited too long.

        Called when a peer becomes ready, and periodically.
        """
        if (deferred := self._poison.without_offer(now)) is not None:
            self._dispatch(deferred, now)
        for state, deadline in sorted(self._waiting.values(), key=lambda each: (each[0].crash_count, each[1])):
            if state.done or self._dispatch(state, now):
                del self._waiting[state.rid]
            elif self._poison.blocks(state):
                self._waiting[state.rid] = state, now + self._timeout  # its own timeout begins when it is first in line
            elif now >= deadline:
                del self._waiting[state.rid]
                state.fail(_timed_out(state))

    # The end of a request.

    def forget(self, state: RequestState) -> None:
        """Forget a request, and abort it if it still runs."""
        self._waiting.pop(state.rid, None)
        self._poison.forget(state)
        self.release_load(state)
        if state.open_indices and state.scheduler:
            self.abort(state, [], "the client is gone")

    def abort(self, state: RequestState, indices: list[int], reason: str) -> None:
        """Abort choices at the request's scheduler, all if `indices` is empty. Do nothing if the scheduler is gone."""
        self.send_abort(state.scheduler, AbortReq(rid=state.rid, indices=indices, reason=reason))

    def send_abort(self, part: str, message: AbortReq) -> None:
        """Send an abort to a peer that is up. A lost abort is repeated when a later heartbeat lists the request."""
        if self.peers.get(part) is not None and not self._outbox.send(part, message):
            logger.warning("%s: abort not sent, repeating it after a later heartbeat rid=%s", part, message.rid)

    def _add_load(self, state: RequestState, scheduler: SchedulerPeer) -> None:
        self.release_load(state)
        tokens = state.prompt_tokens + state.output_tokens
        scheduler.own_tokens += tokens
        self._loads[state.rid] = scheduler, tokens
        if state.has_text:
            self._policy.on_dispatched(state, scheduler)

    def release_load(self, state: RequestState) -> None:
        """Record that a request left its scheduler. Idempotent."""
        if load := self._loads.pop(state.rid, None):
            scheduler, tokens = load
            scheduler.own_tokens -= tokens


def _timed_out(state: RequestState) -> ServerError | UnavailableError:
    if state.output_tokens:
        return ServerError("The part of the server that ran this request died, and no other took over.")
    return UnavailableError("No part of the server took this request in time.", retry_after=1)
