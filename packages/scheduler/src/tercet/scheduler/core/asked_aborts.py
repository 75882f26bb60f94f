"""Aborts that somebody asked for, for as long as the request they name may still be on its way."""

from collections import OrderedDict

from tercet.protocol.messages import AbortReq
from tercet.protocol.values import FinishReason, FinishType, belongs

MOST = 4096


class AskedAborts:
    """Remembers the last of them: a request may wait at its frontend meanwhile, or come again for want of an answer."""

    def __init__(self) -> None:
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def note(self, message: AbortReq) -> None:
        """An abort. What names no request means those that are here, and what nobody asked for comes from its owner."""
        if message.asked and message.rid:
            self._reasons[message.rid] = message.reason
            self._reasons.move_to_end(message.rid)
            if len(self._reasons) > MOST:
                self._reasons.popitem(last=False)

    def finish(self, rid: str) -> FinishReason | None:
        """The end of a request that comes too late, if it does."""
        for name in (rid, rid.rpartition(".")[0]):
            if name in self._reasons and belongs(rid, name):
                return FinishReason(FinishType.ABORT, message=self._reasons[name], asked=True)
        return None
