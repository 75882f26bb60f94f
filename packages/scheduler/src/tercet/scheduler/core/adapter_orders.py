"""Requests of frontends to load an adapter, answered when it is read."""

from collections.abc import Iterator

from tercet.protocol.messages.messages import ControlReply, LoadLoRAAdapterReq
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.config import AdapterRead
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
            outputs.tell(source, ControlReply(id=number, ok=not read.fault, message=read.fault, sha256=read.sha256))

    def drop_frontend(self, peer: str) -> None:
        """Drop the load requests of a dead frontend."""
        for adapter, askers in list(self._asked.items()):
            self._asked[adapter] = left = [asker for asker in askers if asker[0] != peer]
            if not left:
                del self._asked[adapter]
