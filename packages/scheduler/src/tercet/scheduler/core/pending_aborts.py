"""Aborts that somebody asked for, for as long as the request they name may still be on its way."""

from collections import OrderedDict

from tercet.protocol.messages.messages import AbortReq
from tercet.protocol.messages.values import FinishReason, FinishType, belongs

MOST = 4096


class PendingAborts:
    """Remembers the last `MOST`: a request may still wait at its frontend, or be sent again for want of an answer."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def note(self, message: AbortReq) -> None:
        """Remember an abort if it is `asked` and names a rid; any other concerns only choices that are held already."""
        if message.user_requested and message.rid:
            self._reasons[message.rid] = message.reason
            self._reasons.move_to_end(message.rid)
            if len(self._reasons) > MOST:
                self._reasons.popitem(last=False)

    def finish(self, rid: str) -> FinishReason | None:
        """The finish of a request that arrives after its abort; None if it was not aborted."""
        for name in (rid, rid.rpartition(".")[0]):
            if name in self._reasons and belongs(rid, name):
                return FinishReason(FinishType.ABORT, message=self._reasons[name], user_requested=True)
        return None
