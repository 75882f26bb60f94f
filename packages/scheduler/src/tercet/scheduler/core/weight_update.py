"""Weight update from disk: the weights are checked first, then due, then loaded by a plan of their own."""

from tercet.protocol.messages.messages import ControlReply, UpdateWeightsFromDiskReq
from tercet.scheduler.core.events import WeightsRead
from tercet.scheduler.core.outputs import Outputs


class WeightUpdate:
    """Updates of one directory at a time. Requests for the same directory share the answer; others are rejected."""

    def __init__(self) -> None:
        self._path = ""
        self._asked: list[tuple[str, str]] = []
        """(frontend, request id) of each request to answer."""
        self._loading = False
        self.due = ""
        """Directory of checked weights, to be loaded as soon as no choice needs the present ones."""

    @property
    def coming(self) -> bool:
        """Return whether new choices wait for the update."""
        return bool(self.due) or self._loading

    def note(self, source: str, order: UpdateWeightsFromDiskReq, outputs: Outputs) -> None:
        """Add a request; reject it at once if another directory is being loaded."""
        if self._asked and self._path != order.path:
            outputs.send(source, ControlReply(id=order.id, ok=False, message=f"{self._path} is being loaded"))
            return
        self._path = order.path
        self._asked.append((source, order.id))

    def read(self, read: WeightsRead, outputs: Outputs) -> None:
        """Apply the check of a directory: its weights are due, or their `fault` is the answer."""
        if not self._asked or self._path != read.path or self.coming:
            return
        if read.fault:
            self._answer(outputs, read.fault)
        else:
            self.due = read.path

    def load(self) -> str:
        """Return the directory that is due; the caller puts it into the next plan."""
        self._loading = True
        due, self.due = self.due, ""
        return due

    def loaded(self, outputs: Outputs, fault: str) -> None:
        """Answer after the loading plan has committed, with its `fault` if loading failed."""
        self._loading = False
        self._answer(outputs, fault)

    def _answer(self, outputs: Outputs, fault: str = "") -> None:
        for source, number in self._asked:
            outputs.send(source, ControlReply(id=number, ok=not fault, message=fault))
        self._asked.clear()
