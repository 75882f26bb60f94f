"""Ports of the scheduler: its loop uses a core and an executor through them. `wiring` chooses the adapters."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeVar

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.audio import AudioInput, SoundInput
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.embedding_form import EmbeddingForm
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.messages import InternalState
from tercet.protocol.messages.values import Grammar, Held, Load, LoRAAdapter
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.core.embedding.media_inputs import EncodeMediaPlan, EncodeMediaResult
from tercet.scheduler.core.embedding.plan import EncodePlan, EncoderCapacity, EncodeResult
from tercet.scheduler.core.events import Arrival
from tercet.scheduler.core.plan import Capacity, Plan, StepResult

PlanT_co = TypeVar("PlanT_co", covariant=True)
PlanT_contra = TypeVar("PlanT_contra", contravariant=True)
ResultT_co = TypeVar("ResultT_co", covariant=True)
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)

Advance = Callable[[], None]
"""Called by a long step after each piece; see `StatusBoard.advance`."""


class Core(Protocol[PlanT_co, ResultT_contra]):
    """Scheduling core: `core.Scheduler`, a recorder around it, or `core.EmbeddingScheduler`."""

    @property
    def runnable(self) -> bool: ...
    @property
    def empty(self) -> bool: ...
    def handle(self, *arrivals: Arrival) -> list[Outgoing]: ...
    def schedule(self, now: float) -> PlanT_co | None: ...
    def commit(self, result: ResultT_contra) -> list[Outgoing]: ...
    def grammars(self) -> set[Grammar]: ...
    def adapters(self) -> set[LoRAAdapter]: ...
    def media(self) -> set[bytes]: ...
    def load(self) -> Load: ...
    def held(self) -> dict[str, Held]: ...
    def internal_state(self, number: str, now: float) -> InternalState: ...


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


class LoadedAdapter(Protocol):
    """A loaded adapter, as the loop sees it."""

    @property
    def sha256(self) -> str:
        """Return the hash of the adapter's files."""
        ...


class LateMasks(Protocol):
    """Late grammar masks, implemented in `tercet.scheduler.executor.sampling.slot_grammars`."""

    @property
    def busy(self) -> bool:
        """Return whether `pop_ready` will return choices, now or later."""
        ...

    def pop_ready(self, wait: float = 0.0) -> Collection[tuple[int, int]]:
        """Return (slot, step) of choices that sat out since that step and can be planned again; each is returned once.

        Waits up to `wait` seconds for the first.
        """
        ...


class ImageArrays(Protocol):
    """Arrays of images or samples of sounds, implemented in `tercet.scheduler.executor.media`."""

    embeddings: EmbeddingForm | None
    """Form of embeddings that are held in the place of arrays."""

    def add(self, images: Sequence[ImageInput | SoundInput], frames: Sequence[Frame]) -> str:
        """Keep the arrays of a request. Return a fault, or an empty text."""
        ...

    def retain(self, needed: Collection[bytes]) -> None:
        """Drop all arrays but those with these hashes."""
        ...


class AudioSamples(Protocol):
    """Samples of audio clips, implemented in `tercet.scheduler.executor.media.audio`."""

    def add(self, audio: AudioInput, frames: Sequence[Frame]) -> str:
        """Keep the samples of a request. Return a fault, or an empty text."""
        ...

    def retain(self, needed: Collection[bytes]) -> None:
        """Drop all samples but those with these hashes."""
        ...


class Executor(Runner[Plan, StepResult], Protocol):
    """Runner of a generating model."""

    @property
    def capacity(self) -> Capacity:
        """Return the capacity, which is fixed once the executor is built."""
        ...

    @property
    def grammars(self) -> AsyncLoader[Grammar, object] | None:
        """Return the loader of grammars, which choices need before they are planned; None if not supported."""
        ...

    @property
    def late_masks(self) -> LateMasks | None:
        """Return the source of `MaskReady` events; None if grammars are not supported."""
        ...

    @property
    def adapters(self) -> AsyncLoader[LoRAAdapter, LoadedAdapter] | None:
        """Return the loader of adapters; None if adapters are not supported."""
        ...

    @property
    def images(self) -> ImageArrays | None:
        """Return the arrays of images or the samples of sounds in prompts; None if the model takes none."""
        ...

    @property
    def audio(self) -> AudioSamples | None:
        """Return the samples of audio clips; None if the model takes none."""
        ...

    @property
    def weights(self) -> AsyncLoader[str, None]:
        """Return the loader that checks the weights in a directory before a plan loads them."""
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


class MediaEncoder(Runner[EncodeMediaPlan, EncodeMediaResult], Protocol):
    """Runner of the tower of a model alone."""

    @property
    def form(self) -> EmbeddingForm:
        """Return the form of its embeddings, which is fixed once the encoder is built."""
        ...
