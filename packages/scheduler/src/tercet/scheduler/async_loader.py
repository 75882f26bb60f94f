"""Loader between the loop and a reader: reports to the core which items are pending and which are read."""

from collections.abc import Callable
from typing import Generic, TypeVar

from tercet.protocol.messages.values import Grammar, LoRAAdapter
from tercet.scheduler.core.events import AdapterPending, AdapterRead, Arrival, GrammarPending, GrammarRead, Obstacle
from tercet.scheduler.ports import AdapterReader, GrammarReader, Reader

T = TypeVar("T")


class AsyncLoader(Generic[T]):
    """Requests reads and turns their completion into events for the core. Does nothing if there is no reader."""

    def __init__(
        self,
        reader: Reader[T] | None,
        held: Callable[[], set[T]],
        pending: Callable[[T], Obstacle],
        read: Callable[[T], Obstacle],
    ) -> None:
        """Create a loader. `held` returns what is still needed; `pending` and `read` create the core's events."""
        self._reader = reader
        self._held = held
        self._pending = pending
        self._read = read

    @property
    def busy(self) -> bool:
        return self._reader is not None and self._reader.busy

    def request(self, item: T | None) -> list[Arrival]:
        """Request an item that a message needs. Return the event for the core: the item is read, or it is pending."""
        if item is None or self._reader is None:
            return []
        return [Arrival("", self._read(item) if self._reader.want(item) else self._pending(item))]

    def pop_events(self) -> list[Arrival]:
        """Return events for the items that have been read since the last call."""
        return [] if self._reader is None else [Arrival("", self._read(each)) for each in self._reader.take_read()]

    def drop_unused(self) -> None:
        """Drop items that no held request needs."""
        if self._reader is not None:
            self._reader.keep(self._held())


def of_grammars(reader: GrammarReader | None, held: Callable[[], set[Grammar]]) -> AsyncLoader[Grammar]:
    """Return a loader of grammars."""

    def read(grammar: Grammar) -> GrammarRead:
        return GrammarRead(grammar, "" if reader is None else reader.fault(grammar))

    return AsyncLoader(reader, held, GrammarPending, read)


def of_adapters(reader: AdapterReader | None, held: Callable[[], set[LoRAAdapter]]) -> AsyncLoader[LoRAAdapter]:
    """Return a loader of adapters."""

    def read(adapter: LoRAAdapter) -> AdapterRead:
        if reader is None:
            return AdapterRead(adapter)
        return AdapterRead(adapter, reader.fault(adapter), reader.sha256(adapter))

    return AsyncLoader(reader, held, AdapterPending, read)
