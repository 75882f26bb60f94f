"""Frontends that asked for an adapter to be read, and are told when it is."""

from collections.abc import Iterator

from tercet.protocol.messages.messages import ControlReply, LoadLoRAAdapterReq
from tercet.protocol.messages.values import LoRAAdapter
from tercet.scheduler.core.config import AdapterRead
from tercet.scheduler.core.outputs import Outputs


class AdapterLoadRequests:
    """Orders that are not answered yet."""

    def __init__(self) -> None:
        self._asked: dict[LoRAAdapter, list[tuple[str, str]]] = {}

    def __iter__(self) -> Iterator[LoRAAdapter]:
        return iter(self._asked)

    def note(self, source: str, order: LoadLoRAAdapterReq) -> None:
        """Somebody asks."""
        self._asked.setdefault(order.adapter, []).append((source, order.id))

    def answer(self, read: AdapterRead, outputs: Outputs) -> None:
        """Tell all who asked for an adapter what came of it."""
        for source, number in self._asked.pop(read.adapter, []):
            outputs.tell(source, ControlReply(id=number, ok=not read.fault, message=read.fault, sha256=read.sha256))

    def drop_frontend(self, peer: str) -> None:
        """Nobody is there any more to be told."""
        for adapter, askers in list(self._asked.items()):
            self._asked[adapter] = left = [asker for asker in askers if asker[0] != peer]
            if not left:
                del self._asked[adapter]
