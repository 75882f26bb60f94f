"""The scheduler's ports: what its loop needs of an executor. Adapters are chosen in `wiring`."""

from collections.abc import Callable, Collection
from typing import Protocol, TypeVar

from tercet.protocol.messages.values import Grammar, LoRAAdapter
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult
from tercet.scheduler.core.plan import Capacity, Plan, StepResult

PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)

Advance = Callable[[], None]
"""Whoever computes a step that can take long calls it when a piece is done: see `StatusBoard.advance`."""


class Pending(Protocol[ResultT_co]):
    """A submitted step."""

    def result(self) -> ResultT_co:
        """Wait for the step. Raises what the forward raised."""
        ...


class Runner(Protocol[PlanT_contra, ResultT_co]):
    """Runs plans in the order they are submitted."""

    def submit(self, plan: PlanT_contra) -> Pending[ResultT_co]:
        """Start a step; it may still be running when this returns."""
        ...

    def close(self) -> None:
        """Free devices and peers."""
        ...


WantedT = TypeVar("WantedT")


class Reader(Protocol[WantedT]):
    """Reads what choices need before they are planned, in threads of its own, each thing once for all who need it."""

    @property
    def busy(self) -> bool:
        """Whether `take_read` has something to tell, now or later."""
        ...

    def want(self, wanted: WantedT) -> bool:
        """Whether it is read; if it is not, begin, and tell in `take_read`."""
        ...

    def take_read(self) -> list[WantedT]:
        """What was not read when it was wanted, and is by now; each is told once."""
        ...

    def fault(self, read: WantedT) -> str:
        """Why something that was read is of no use, for whoever sent it; empty if it is."""
        ...

    def keep(self, wanted: Collection[WantedT]) -> None:
        """Forget the others."""
        ...


GrammarReader = Reader[Grammar]
"""See `tercet.scheduler.grammar.loader`."""


class AdapterReader(Reader[LoRAAdapter], Protocol):
    """See `tercet.scheduler.executor.lora.loader`."""

    def sha256(self, adapter: LoRAAdapter) -> str:
        """Of the files of an adapter that was read; empty if that failed."""
        ...

    def forget(self, adapter: LoRAAdapter) -> None:
        """Do not keep it for requests to come."""
        ...


class LateMasks(Protocol):
    """See `tercet.scheduler.executor.sampling.slot_grammars`."""

    @property
    def busy(self) -> bool:
        """Whether `take_ready` has something to tell, now or later."""
        ...

    def take_ready(self, wait: float = 0.0) -> Collection[tuple[int, int]]:
        """Return (slot, step) of choices that sat out since that step and can be planned again; each is told once.

        Waits so many seconds for the first.
        """
        ...


class WeightsReader(Protocol):
    """See `tercet.scheduler.executor.weights_loader`."""

    @property
    def busy(self) -> bool:
        """Whether `take_read` has something to tell, now or later."""
        ...

    def want(self, path: str) -> None:
        """Look whether the weights of a directory could be loaded."""
        ...

    def take_read(self) -> Collection[tuple[str, str]]:
        """Each path that has been looked at, and why its weights cannot be loaded; empty where they can."""
        ...


class Executor(Runner[Plan, StepResult], Protocol):
    """Runs a model that generates."""

    @property
    def capacity(self) -> Capacity:
        """Fixed once the executor is built."""
        ...

    @property
    def grammars(self) -> GrammarReader | None:
        """What must be read before it can be planned goes there first."""
        ...

    @property
    def late_masks(self) -> LateMasks | None:
        """Who tells when choices whose masks were late can go on; None where no grammars are followed."""
        ...

    @property
    def adapters(self) -> AdapterReader | None:
        """The same of adapters; None where none can be run."""
        ...

    @property
    def weights(self) -> WeightsReader:
        """Who looks at weights before a plan has them loaded."""
        ...

    def prepare(self) -> bool:
        """Do a part of what makes later steps faster, while there is nothing else to do; False when all is done."""
        ...


class Encoder(Runner[EncodePlan, EncodeResult], Protocol):
    """Runs a model that gives one vector, or the scores of a classifier, for each input."""

    @property
    def capacity(self) -> EncoderCapacity:
        """Fixed once the encoder is built."""
        ...
