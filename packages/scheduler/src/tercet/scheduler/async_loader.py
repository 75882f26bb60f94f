"""What choices need to have read before they are planned, between the loop and who reads it."""

from collections.abc import Callable
from typing import Generic, TypeVar

from tercet.protocol.messages.values import Grammar, LoRAAdapter
from tercet.scheduler.core.config import AdapterPending, AdapterRead, Arrival, GrammarPending, GrammarRead, Obstacle
from tercet.scheduler.ports import AdapterReader, GrammarReader, Reader

T = TypeVar("T")


class AsyncLoader(Generic[T]):
    """Tells a core what is being read, and what has been. Without a reader there is nothing to tell."""

    def __init__(
        self,
        reader: Reader[T] | None,
        held: Callable[[], set[T]],
        pending: Callable[[T], Obstacle],
        read: Callable[[T], Obstacle],
    ) -> None:
        """`held` is what is still needed; `pending` and `read` make what the core is told."""
        self._reader = reader
        self._held = held
        self._pending = pending
        self._read = read

    @property
    def busy(self) -> bool:
        """Whether there is something to tell, now or later."""
        return self._reader is not None and self._reader.busy

    def want(self, wanted: T | None) -> list[Arrival]:
        """What there is to say of what a message that has arrived needs."""
        if wanted is None or self._reader is None:
            return []
        return [Arrival("", self._read(wanted) if self._reader.want(wanted) else self._pending(wanted))]

    def news(self) -> list[Arrival]:
        """What has been read meanwhile."""
        return [] if self._reader is None else [Arrival("", self._read(each)) for each in self._reader.take_read()]

    def tidy(self) -> None:
        """Forget what nobody needs any more."""
        if self._reader is not None:
            self._reader.keep(self._held())


def of_grammars(reader: GrammarReader | None, held: Callable[[], set[Grammar]]) -> AsyncLoader[Grammar]:
    """A `AsyncLoader` of grammars."""

    def read(grammar: Grammar) -> GrammarRead:
        return GrammarRead(grammar, "" if reader is None else reader.fault(grammar))

    return AsyncLoader(reader, held, GrammarPending, read)


def of_adapters(reader: AdapterReader | None, held: Callable[[], set[LoRAAdapter]]) -> AsyncLoader[LoRAAdapter]:
    """A `AsyncLoader` of adapters."""

    def read(adapter: LoRAAdapter) -> AdapterRead:
        if reader is None:
            return AdapterRead(adapter)
        return AdapterRead(adapter, reader.fault(adapter), reader.sha256(adapter))

    return AsyncLoader(reader, held, AdapterPending, read)
