"""Dispatch of requests to schedulers and detokenizers, and aborts."""

import logging

from tercet.frontend.routing.peers import PeerRegistry
from tercet.frontend.routing.request_state import RequestState
from tercet.frontend.routing.router import DataParallelController
from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.node import Sender

logger = logging.getLogger(__name__)


class Dispatcher:
    """Sender of requests to ready schedulers."""

    def __init__(self, outbox: Sender, fleet: PeerRegistry, controller: DataParallelController) -> None:
        self._outbox = outbox
        self._fleet = fleet
        self._controller = controller

    def dispatch(
        self, state: RequestState, now: float, *, exclusive: bool = False, other_detokenizer: bool = False
    ) -> bool:
        """Start the next attempt. Return False, without side effects, if no scheduler or detokenizer is available.

        A scheduler defers an `exclusive` request until it has offered to run only this request. With
        `other_detokenizer` a detokenizer other than the present one is chosen, if there is one.
        """
        detokenizer = ""
        if state.has_text:
            avoid = state.detokenizer if other_detokenizer else ""
            chosen = self._controller.detokenizer(self._fleet.eligible_detokenizers(), avoid)
            if chosen is None:
                return False
            detokenizer = chosen.peer
        for scheduler in self._controller.schedulers(state, self._fleet.able_schedulers(state)):
            deferred = exclusive and state.offered_by != scheduler.peer
            message = state.message(state.next_attempt, detokenizer, exclusive=exclusive, deferred=deferred)
            if self._outbox.send(scheduler.peer, message):
                if state.scheduler not in {"", scheduler.peer}:
                    self.abort(state, [], "went on elsewhere")
                self._controller.on_dispatched(state, scheduler)
                state.dispatched(scheduler.peer, detokenizer, now, exclusive=exclusive)
                return True
        return False

    def release(self, state: RequestState) -> None:
        self._controller.release(state)

    def on_peer_down(self, scheduler: str) -> None:
        """Forget a scheduler that went down, and the contents of its cache."""
        self._controller.on_peer_down(scheduler)

    def abort(self, state: RequestState, indices: list[int], reason: str) -> None:
        """Abort choices at the request's scheduler, all if `indices` is empty. Do nothing if the scheduler is gone."""
        self.send_abort(state.scheduler, AbortReq(rid=state.rid, indices=indices, reason=reason))

    def send_abort(self, part: str, message: AbortReq) -> None:
        """Send an abort to a peer that is up. A lost abort is repeated when a later heartbeat lists the request."""
        if self._fleet.get(part) is not None and not self._outbox.send(part, message):
            logger.warning("%s: abort not sent, repeating it after a later heartbeat rid=%s", part, message.rid)
