"""Requests whose scheduler or detokenizer died go on elsewhere, from the token they had got to.

A scheduler that takes over gets the ids emitted so far, a detokenizer the number of characters: no token is lost or
repeated. A request that finds no eligible part waits for one, `timeout` seconds at the most.
"""

import logging
from collections.abc import Iterable

from tercet.frontend.dispatch import Dispatcher
from tercet.frontend.errors import ServerError
from tercet.frontend.req_state import ReqState

logger = logging.getLogger(__name__)


class Recovery:
    """Dispatches again what lost its route. `now` is any monotonic clock in seconds."""

    def __init__(self, dispatcher: Dispatcher, timeout: float) -> None:
        self._dispatcher = dispatcher
        self._timeout = timeout
        self._waiting: dict[str, tuple[ReqState, float]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def peer_down(self, peer: str, states: Iterable[ReqState], now: float) -> None:
        """A scheduler or detokenizer is gone: every open request routed through it takes another way."""
        lost = [state for state in states if not state.done and peer in {state.scheduler, state.detokenizer}]
        if lost:
            logger.warning("%s is gone with %d requests in flight: dispatching them again", peer, len(lost))
        for state in lost:
            self.again(state, now)

    def again(self, state: ReqState, now: float) -> None:
        """Dispatch a request again, or keep it until that is possible."""
        if self._dispatcher.dispatch(state):
            self._waiting.pop(state.rid, None)
        else:
            self.later(state, now)

    def later(self, state: ReqState, now: float) -> None:
        """Keep a request for the next `retry`."""
        self._waiting.setdefault(state.rid, (state, now + self._timeout))

    def retry(self, now: float) -> None:
        """Try everything that waits, oldest first; what waited too long ends in an error.

        Called when a part gets ready, and now and then.
        """
        for rid, (state, deadline) in list(self._waiting.items()):
            if state.done or self._dispatcher.dispatch(state):
                del self._waiting[rid]
            elif now >= deadline:
                del self._waiting[rid]
                state.fail(ServerError("The part of the server that ran this request died, and no other took over."))

    def forget(self, state: ReqState) -> None:
        """The client is gone."""
        self._waiting.pop(state.rid, None)
