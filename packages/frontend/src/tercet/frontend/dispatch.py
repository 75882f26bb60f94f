"""Sending a request on its way: the first time, and again after a part died."""

import logging

from tercet.frontend.fleet import Fleet
from tercet.frontend.req_state import ReqState
from tercet.frontend.router import DataParallelController
from tercet.protocol.messages import AbortReq
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)


class Dispatcher:
    """Routes requests to parts that are ready, and calls them back."""

    def __init__(self, outbox: Sender, fleet: Fleet, controller: DataParallelController) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._controller = controller

    def dispatch(self, state: ReqState) -> bool:
        """Start the next attempt. False, and nothing has changed, when no scheduler or no detokenizer takes it."""
        detokenizer = self._controller.detokenizer(self._fleet.eligible_detokenizers())
        if detokenizer is None:
            return False
        message = state.message(state.attempt + 1, detokenizer.peer)
        eligible = self._fleet.eligible_schedulers(state.model.identity.weights)
        for scheduler in self._controller.schedulers(state, eligible):
            if self._outbox.send(scheduler.peer, message):
                if state.scheduler not in {"", scheduler.peer}:
                    self.abort(state, [], "went on elsewhere")
                state.attempt, state.scheduler, state.detokenizer = message.attempt, scheduler.peer, detokenizer.peer
                return True
        return False

    def abort(self, state: ReqState, indices: list[int], reason: str) -> None:
        """Tell the scheduler to stop choices (all when empty); one that is gone has stopped."""
        if state.scheduler not in self._fleet.schedulers:
            return
        if not self._outbox.send(state.scheduler, AbortReq(rid=state.rid, indices=indices, reason=reason)):
            logger.warning("cannot tell %s to abort %s", state.scheduler, state.rid)
