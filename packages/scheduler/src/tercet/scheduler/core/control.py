"""Control requests of frontends that are answered later: adapters to load, weight updates, memory to release."""

from collections import deque
from collections.abc import Iterator

from tercet.protocol.messages.messages import (
    ControlReply,
    LoadLoRAAdapterReq,
    MemoryReq,
    ResumeMemoryReq,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import LoRAAdapter, MemoryTag
from tercet.scheduler.core.events import AdapterRead, WeightsRead
from tercet.scheduler.core.outputs import Outputs


class AdapterLoadRequests:
    """Load requests without an answer yet."""

    def __init__(self) -> None:
        self._asked: dict[LoRAAdapter, list[tuple[str, str]]] = {}

    def __iter__(self) -> Iterator[LoRAAdapter]:
        return iter(self._asked)

    def note(self, source: str, order: LoadLoRAAdapterReq) -> None:
        self._asked.setdefault(order.adapter, []).append((source, order.id))

    def answer(self, read: AdapterRead, outputs: Outputs) -> None:
        """Answer all load requests for an adapter that was read."""
        for source, number in self._asked.pop(read.adapter, []):
            outputs.send(source, ControlReply(id=number, ok=not read.fault, message=read.fault, sha256=read.sha256))

    def drop_frontend(self, peer: str) -> None:
        """Drop the load requests of a dead frontend."""
        for adapter, askers in list(self._asked.items()):
            self._asked[adapter] = left = [asker for asker in askers if asker[0] != peer]
            if not left:
                del self._asked[adapter]


class WeightUpdate:
    """Weight updates, one directory at a time: it is checked first, then due, then loaded by a plan of its own.

    Requests for the same directory share the answer; others are rejected.
    """

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


class MemoryOccupation:
    """Memory that the executor has released, and requests to release or resume some, in order.

    Each has a plan of its own. No step is planned between the plan that releases memory and the commit of the one that
    resumes the last of it.
    """

    def __init__(self) -> None:
        self._released: frozenset[MemoryTag] = frozenset()
        self._planned: frozenset[MemoryTag] | None = None
        """Memory that is released once the plan in flight has run."""
        self._asked: deque[tuple[str, MemoryReq]] = deque()

    @property
    def released(self) -> frozenset[MemoryTag]:
        """Return the memory that a plan must not use."""
        return self._released | (self._planned or frozenset())

    @property
    def due(self) -> bool:
        """Return whether a request waits for its plan."""
        return bool(self._asked) and self._planned is None

    def note(self, source: str, order: MemoryReq) -> None:
        self._asked.append((source, order))

    def plan(self) -> list[MemoryTag]:
        """Return the memory that the executor is without after the next plan."""
        order = self._asked[0][1]
        tags = frozenset(order.tags)
        self._planned = self._released - tags if isinstance(order, ResumeMemoryReq) else self._released | tags
        return sorted(self._planned)

    def changed(self, outputs: Outputs, fault: str) -> None:
        """Answer after the plan has committed, with its `fault` if memory was short."""
        source, order = self._asked.popleft()
        if self._planned is not None and not fault:
            self._released = self._planned
        self._planned = None
        outputs.send(source, ControlReply(id=order.id, ok=not fault, message=fault))

    def weights_loaded(self) -> None:
        """Note that the executor has weights, because a plan loaded others."""
        self._released -= {MemoryTag.WEIGHTS}
