"""Ports of the scheduler: the interfaces through which its loop uses an executor. `wiring` chooses the adapters."""

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from tercet.protocol.messages.values import Grammar, LoRAAdapter
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult
from tercet.scheduler.core.plan import Capacity, Plan, StepResult

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)

Advance = Callable[[], None]
"""Called by a long step after each piece; see `StatusBoard.advance`."""


class Pending(Protocol[ResultT_co]):
    """A submitted step."""

    def result(self) -> ResultT_co:
        """Wait for the step. Raises the exception of the forward pass."""
        ...


class Runner(Protocol[PlanT_contra, ResultT_co]):
    """Executor of plans, in the order they are submitted."""

    def submit(self, plan: PlanT_contra) -> Pending[ResultT_co]:
        """Start a step. It may still be running when this returns."""
        ...

    def close(self) -> None:
        """Free devices and peers."""
        ...


WantedT = TypeVar("WantedT")


class Reader(Protocol[WantedT]):
    """Background loader of items that choices need before they are planned. Each item is read once for all choices."""

    @property
    def busy(self) -> bool:
        """Return whether `take_read` will return items, now or later."""
        ...

    def want(self, wanted: WantedT) -> bool:
        """Return whether an item is read. If it is not, start reading it; `take_read` reports the end."""
        ...

    def take_read(self) -> list[WantedT]:
        """Return items that were requested before they were read and are read now; each is returned once."""
        ...

    def fault(self, read: WantedT) -> str:
        """Return why a read item is unusable, as a message for its sender; empty if it is usable."""
        ...

    def keep(self, wanted: Collection[WantedT]) -> None:
        """Forget all other items."""
        ...


GrammarReader = Reader[Grammar]
"""Implemented in `tercet.scheduler.grammar.loader`."""


class AdapterReader(Reader[LoRAAdapter], Protocol):
    """Reader of adapters, implemented in `tercet.scheduler.executor.lora.loader`."""

    def sha256(self, adapter: LoRAAdapter) -> str:
        """Return the hash of a read adapter's files; empty if reading failed."""
        ...

    def forget(self, adapter: LoRAAdapter) -> None:
        """Do not keep an adapter for future requests."""
        ...


class LateMasks(Protocol):
    """Late grammar masks, implemented in `tercet.scheduler.executor.sampling.slot_grammars`."""

    @property
    def busy(self) -> bool:
        """Return whether `take_ready` will return choices, now or later."""
        ...

    def take_ready(self, wait: float = 0.0) -> Collection[tuple[int, int]]:
        """Return (slot, step) of choices that sat out since that step and can be planned again; each is returned once.

        Waits up to `wait` seconds for the first.
        """
        ...


class WeightsReader(Protocol):
    """Checker of weights, implemented in `tercet.scheduler.executor.weights_loader`."""

    @property
    def busy(self) -> bool:
        """Return whether `take_read` will return paths, now or later."""
        ...

    def want(self, path: str) -> None:
        """Start checking whether the weights of a directory can be loaded."""
        ...

    def take_read(self) -> Collection[tuple[str, str]]:
        """Return each checked path and why its weights cannot be loaded; the reason is empty if they can."""
        ...


class Executor(Runner[Plan, StepResult], Protocol):
    """Runner of a generating model."""

    @property
    def capacity(self) -> Capacity:
        """Return the capacity, which is fixed once the executor is built."""
        ...

    @property
    def grammars(self) -> GrammarReader | None:
        """Return the reader of grammars, which choices need before they are planned; None if not supported."""
        ...

    @property
    def late_masks(self) -> LateMasks | None:
        """Return the source of `MaskReady` events; None if grammars are not supported."""
        ...

    @property
    def adapters(self) -> AdapterReader | None:
        """Return the reader of adapters; None if adapters are not supported."""
        ...

    @property
    def weights(self) -> WeightsReader:
        """Return the checker of weights, used before a plan loads them."""
        ...

    def prepare(self) -> bool:
        """Do part of the work that makes later steps faster, while there is no other work.

        Return False when all is done.
        """
        ...


class Encoder(Runner[EncodePlan, EncodeResult], Protocol):
    """Runner of a model that returns one vector, or a classifier's scores, for each input."""

    @property
    def capacity(self) -> EncoderCapacity:
        """Return the capacity, which is fixed once the encoder is built."""
        ...
