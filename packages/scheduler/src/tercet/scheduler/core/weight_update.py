"""New weights that somebody asked for: looked at first, then waited for, then loaded by a plan of their own."""

from tercet.protocol.messages.messages import ControlReply, UpdateWeightsFromDiskReq
from tercet.scheduler.core.config import WeightsRead
from tercet.scheduler.core.outputs import Outputs


class WeightUpdate:
    """One directory at a time: who orders the same meanwhile shares the answer, who orders another is refused."""

    def __init__(self) -> None:
        self._path = ""
        self._asked: list[tuple[str, str]] = []
        """(frontend, id of the order), each of whom gets an answer."""
        self._loading = False
        self.due = ""
        """The directory of weights that can be loaded, as soon as nothing needs those that are there."""

    @property
    def coming(self) -> bool:
        """Whether new choices wait for them."""
        return bool(self.due) or self._loading

    def note(self, source: str, order: UpdateWeightsFromDiskReq, outputs: Outputs) -> None:
        """A frontend asks; refused at once if another directory is under way."""
        if self._asked and self._path != order.path:
            outputs.tell(source, ControlReply(id=order.id, ok=False, message=f"{self._path} is being loaded"))
            return
        self._path = order.path
        self._asked.append((source, order.id))

    def read(self, read: WeightsRead, outputs: Outputs) -> None:
        """The directory was looked at: its weights are due, or their `fault` is the answer."""
        if not self._asked or self._path != read.path or self.coming:
            return
        if read.fault:
            self._answer(outputs, read.fault)
        else:
            self.due = read.path

    def load(self) -> str:
        """The directory that is due; the caller puts it into the next plan."""
        self._loading = True
        due, self.due = self.due, ""
        return due

    def loaded(self, outputs: Outputs, fault: str) -> None:
        """The plan that loads has committed: answer, with its `fault` if loading failed."""
        self._loading = False
        self._answer(outputs, fault)

    def _answer(self, outputs: Outputs, fault: str = "") -> None:
        for source, number in self._asked:
            outputs.tell(source, ControlReply(id=number, ok=not fault, message=fault))
        self._asked.clear()
