"""`RequestTable`: the requests of one frontend, from their first dispatch to their release."""

import time
from collections.abc import Callable, Sequence

from tercet.frontend.errors import RateLimitError, UnavailableError
from tercet.frontend.http.auth import current_caller
from tercet.frontend.http.loop_turns import LoopTurns, Steps
from tercet.frontend.manager.counters import Counters, RequestOutcome
from tercet.frontend.manager.embedding_state import EmbeddingBatch
from tercet.frontend.manager.quota import ApiKeyQuota, RequestSlot
from tercet.frontend.manager.req_state import Generation
from tercet.frontend.manager.request_reports import RequestReports
from tercet.frontend.routing.dispatcher import Dispatcher
from tercet.frontend.routing.request_state import RequestState
from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import belongs


class RequestTable:
    """Requests by id, with their quota and counters. All methods run on the event loop's thread.

    `peer` is the id of this frontend.
    """

    def __init__(
        self,
        peer: str,
        dispatcher: Dispatcher,
        quota: ApiKeyQuota | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer = peer
        self.states: dict[str, RequestState] = {}
        self.counters = Counters(dispatcher.redispatches)
        self.dispatcher = dispatcher
        self.quota = quota or ApiKeyQuota()
        self.clock = clock
        self.turns = LoopTurns()
        self.reports = RequestReports(self.turns, self.counters.telemetry_failures)

    def __len__(self) -> int:
        return len(self.states)

    def admit(self, answers: int = 1, param: str | None = None) -> RequestSlot:
        """Reserve quota for this number of answers. Raises ApiError, naming `param` if there are too many."""
        try:
            slot = self.quota.acquire(answers, param)
        except RateLimitError:
            self.counters.over_limit += 1
            raise
        slot.admitted_at = self.clock()
        return slot

    def start(self, state: RequestState, tokenized_at: float | None = None) -> None:
        """Dispatch or enqueue a request, by default just tokenized. Raises UnavailableError if neither is possible."""
        now = self.clock()
        self.states[state.rid] = state
        state.started_at = now if tokenized_at is None else tokenized_at
        if not self.dispatcher.submit(state, now):
            state.fail(UnavailableError("No scheduler takes requests now.", retry_after=1))
            raise UnavailableError("No scheduler takes requests now.", retry_after=1)

    def release(self, asked: Generation | EmbeddingBatch) -> None:
        """Forget requests and abort those that still run. Idempotent."""
        asked.slot.release()
        ended = [state for state in asked.states if self.states.pop(state.rid, None) is not None]
        self.turns.start(current_caller().owner, self._forget(ended))
        if ended:
            self.reports.start(ended, asked.slot.admitted_at, self.clock)

    def _forget(self, ended: Sequence[RequestState]) -> Steps[None]:
        for state in ended:
            outcome = outcome_of(state)
            self.counters.outcomes[outcome] += 1
            self.counters.resumed_finished += outcome is RequestOutcome.FINISHED and state.attempt > 0
            self.dispatcher.forget(state)
            yield

    def abort(self, rid: str) -> None:
        """Abort the requests with this id, or all requests that one HTTP request was split into.

        Schedulers are asked to abort requests of other frontends. Consumers of an aborted request get
        RequestAbortedError, or the output so far if the request keeps it.
        """
        own = [state for state in self.states.values() if belongs(state.rid, rid)]
        self.turns.start(current_caller().owner, self._abort(own))
        if not own:
            self._abort_elsewhere(AbortReq(rid=rid, reason="aborted by request", user_requested=True))

    def abort_all(self) -> None:
        """Abort every request, including those of other frontends."""
        self.turns.start(current_caller().owner, self._abort(list(self.states.values())))
        self._abort_elsewhere(AbortReq(rid="", reason="all are aborted", user_requested=True))

    def _abort(self, states: Sequence[RequestState]) -> Steps[None]:
        """Abort requests. Their release tells the scheduler, unless their choices count as finished already."""
        for state in states:
            was_open = bool(state.open_indices)
            state.abort()
            if was_open and not state.open_indices and state.scheduler:
                self.dispatcher.abort(state, [], "aborted by request")
            yield

    def _abort_elsewhere(self, message: AbortReq) -> None:
        for scheduler in self.dispatcher.peers.schedulers:
            self.dispatcher.send_abort(scheduler, message)


def outcome_of(state: RequestState) -> RequestOutcome:
    if state.aborted:
        return RequestOutcome.REFUSED
    if state.error is not None:
        return RequestOutcome.FAILED if state.error.status == 500 else RequestOutcome.REFUSED
    return RequestOutcome.FINISHED if state.done else RequestOutcome.CLIENT_GONE
