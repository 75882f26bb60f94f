"""Sending a request on its way: the first time, and again after a part died."""

import logging

from tercet.frontend.routing.peers import PeerRegistry
from tercet.frontend.routing.request_state import RequestState
from tercet.frontend.routing.router import DataParallelController
from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)


class Dispatcher:
    """Routes requests to parts that are ready, and calls them back."""

    def __init__(self, outbox: Sender, fleet: PeerRegistry, controller: DataParallelController) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._controller = controller

    def dispatch(
        self, state: RequestState, now: float, *, alone: bool = False, other_detokenizer: bool = False
    ) -> bool:
        """Start the next attempt. False, and nothing has changed, when no scheduler or no detokenizer takes it.

        A request that is to run `alone` is held by the scheduler until it has offered to run nothing else. With
        `other_detokenizer` another detokenizer than the present one is taken, where there is one.
        """
        detokenizer = ""
        if state.has_text:
            avoid = state.detokenizer if other_detokenizer else ""
            chosen = self._controller.detokenizer(self._fleet.eligible_detokenizers(), avoid)
            if chosen is None:
                return False
            detokenizer = chosen.peer
        for scheduler in self._controller.schedulers(state, self._fleet.able_schedulers(state)):
            hold = alone and state.offered_by != scheduler.peer
            message = state.message(state.next_attempt, detokenizer, alone=alone, hold=hold)
            if self._outbox.send(scheduler.peer, message):
                if state.scheduler not in {"", scheduler.peer}:
                    self.abort(state, [], "went on elsewhere")
                self._controller.sent(state, scheduler)
                state.dispatched(scheduler.peer, detokenizer, now, alone=alone)
                return True
        return False

    def ended(self, state: RequestState) -> None:
        """A request is no longer with its scheduler."""
        self._controller.ended(state)

    def gone(self, scheduler: str) -> None:
        """A scheduler went down, and its cache with it."""
        self._controller.gone(scheduler)

    def abort(self, state: RequestState, indices: list[int], reason: str) -> None:
        """Tell the scheduler to stop choices (all when empty); one that is gone has stopped."""
        self.call_off(state.scheduler, AbortReq(rid=state.rid, indices=indices, reason=reason))

    def call_off(self, part: str, message: AbortReq) -> None:
        """Tell a part, if it is there. What gets lost is told again when its heartbeats still name it."""
        if self._fleet.get(part) is not None and not self._outbox.send(part, message):
            logger.warning("cannot tell %s to abort %s", part, message.rid)
