"""New weights that somebody asked for: looked at first, then waited for, then loaded by a plan of their own."""

from tercet.protocol.messages import ControlReply, UpdateWeightsFromDiskReq
from tercet.scheduler.core.config import WeightsRead
from tercet.scheduler.core.outputs import Outputs


class WeightsOrder:
    """The one order that is obeyed at a time. Others are refused meanwhile."""

    def __init__(self) -> None:
        self._asked: tuple[str, UpdateWeightsFromDiskReq] | None = None
        self._loading = False
        self.due = ""
        """The directory of weights that can be loaded, as soon as nothing needs those that are there."""

    @property
    def coming(self) -> bool:
        """Whether new choices wait for them."""
        return bool(self.due) or self._loading

    def note(self, source: str, order: UpdateWeightsFromDiskReq, outputs: Outputs) -> None:
        """Somebody asks."""
        if self._asked is None:
            self._asked = source, order
        else:
            other = self._asked[1].path
            outputs.tell(source, ControlReply(id=order.id, ok=False, message=f"{other} is being loaded"))

    def read(self, read: WeightsRead, outputs: Outputs) -> None:
        """They were looked at: they are due, or refused."""
        if self._asked is None or self._asked[1].path != read.path or self.due or self._loading:
            return
        if read.fault:
            self._answer(outputs, read.fault)
        else:
            self.due = read.path

    def load(self) -> str:
        """What is due, to be loaded by the next plan."""
        self._loading = True
        due, self.due = self.due, ""
        return due

    def loaded(self, outputs: Outputs) -> None:
        """That plan has committed."""
        self._loading = False
        self._answer(outputs)

    def _answer(self, outputs: Outputs, fault: str = "") -> None:
        if self._asked is not None:
            source, order = self._asked
            outputs.tell(source, ControlReply(id=order.id, ok=not fault, message=fault))
        self._asked = None
