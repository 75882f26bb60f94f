"""Aborts of requests that may arrive later."""

from collections import OrderedDict

from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import FinishReason, FinishType, belongs

MAX_PENDING_ABORTS = 4096


class PendingAborts:
    """The last `MAX_PENDING_ABORTS` aborts.

    Their requests may still wait at a frontend, or be dispatched again after a lost answer.
    """

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def note(self, message: AbortReq) -> None:
        """Remember a `user_requested` abort that names a rid; other aborts concern only choices already held."""
        if message.user_requested and message.rid:
            self._reasons[message.rid] = message.reason
            self._reasons.move_to_end(message.rid)
            if len(self._reasons) > MAX_PENDING_ABORTS:
                self._reasons.popitem(last=False)

    def finish(self, rid: str) -> FinishReason | None:
        """Return the finish of a request that arrives after its abort; None if it was not aborted."""
        for name in (rid, rid.rpartition(".")[0]):
            if name in self._reasons and belongs(rid, name):
                return FinishReason(FinishType.ABORT, message=self._reasons[name], user_requested=True)
        return None
