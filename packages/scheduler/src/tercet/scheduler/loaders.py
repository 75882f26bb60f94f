"""Grammars, adapters, weights and media of requests: loaded while the loop goes on, and events for the core."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tercet.protocol.backlog import Outgoing
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.messages import (
    ControlReply,
    Rejected,
    TokenizedGenerateReqInput,
    UpdateWeightsFromDiskReq,
)
from tercet.protocol.messages.values import Grammar, LoRAAdapter
from tercet.protocol.messages.weight_transfers import WeightTransferReq
from tercet.scheduler.async_loader import AsyncLoader
from tercet.scheduler.core.events import (
    AdapterPending,
    AdapterRead,
    Arrival,
    GrammarPending,
    GrammarRead,
    MaskReady,
    WeightsRead,
)
from tercet.scheduler.core.images import inputs_of
from tercet.scheduler.ports import AudioSamples, Core, ImageArrays, LateMasks, LoadedAdapter
from tercet.scheduler.weight_transfer.weight_transfers import WeightTransfers


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """The loaders of one scheduler; None for what its executor does not support. Its loop's thread calls all methods.

    The core gets an event when something starts to load and another when it has loaded or failed. It plans no choice
    whose grammar or adapter is not loaded.
    """

    grammars: AsyncLoader[Grammar, object] | None = None
    late_masks: LateMasks | None = None
    adapters: AsyncLoader[LoRAAdapter, LoadedAdapter] | None = None
    weights: AsyncLoader[str, None] | None = None
    transfers: WeightTransfers | None = None
    images: ImageArrays | None = None
    audio: AudioSamples | None = None

    @property
    def busy(self) -> bool:
        """Return whether something is being loaded, so that the loop must poll."""
        loaders = (self.grammars, self.adapters, self.late_masks, self.weights, self.transfers)
        return any(each is not None and each.busy for each in loaders)

    def poll(self) -> tuple[list[Arrival], list[Outgoing]]:
        """Return events for what has been loaded since the last call, and answers to weight transfers that ended."""
        events: list[Arrival] = []
        answers: list[Outgoing] = []
        if self.grammars is not None and self.grammars.busy:
            events += [_grammar_read(self.grammars, each) for each in self.grammars.pop_loaded()]
        if self.adapters is not None and self.adapters.busy:
            events += [_adapter_read(self.adapters, each) for each in self.adapters.pop_loaded()]
        if self.late_masks is not None and self.late_masks.busy:
            events += [Arrival("", MaskReady(*each)) for each in self.late_masks.pop_ready()]
        if self.weights is not None and self.weights.busy:
            events += [self._weights_read(self.weights, path) for path in self.weights.pop_loaded()]
        if self.transfers is not None and self.transfers.busy:
            for source, outcome in self.transfers.pop_finished():
                if isinstance(outcome, ControlReply):
                    answers.append((source, outcome))
                else:
                    events.append(self.update(source, outcome))
        return events, answers

    def keep_media(self, request: TokenizedGenerateReqInput, frames: Sequence[Frame]) -> Rejected | None:
        """Keep the arrays of a request's images, or its audio, or return its rejection."""
        fault = ""
        if (inputs := inputs_of(request)) and self.images is not None:
            if request.embedded != (self.images.embeddings is not None):
                kind = "arrays and no embeddings" if request.embedded else "embeddings and no arrays"
                why = f"this scheduler takes {kind} of images and sounds"
                return Rejected(rid=request.rid, attempt=request.attempt, code="invalid_request", message=why)
            fault = self.images.add(inputs, frames)
        elif request.audio is not None and self.audio is not None:
            fault = self.audio.add(request.audio, frames)
        if not fault:
            return None
        return Rejected(rid=request.rid, attempt=request.attempt, code="overloaded", message=fault, retry=True)

    def load(self, grammar: Grammar | None, adapter: LoRAAdapter | None) -> Iterator[Arrival]:
        """Load what a message needs. Yield an event for each: it is pending, or it has been loaded."""
        if grammar is not None and self.grammars is not None:
            loaded = self.grammars.request(grammar)
            yield _grammar_read(self.grammars, grammar) if loaded else Arrival("", GrammarPending(grammar))
        if adapter is not None and self.adapters is not None:
            loaded = self.adapters.request(adapter)
            yield _adapter_read(self.adapters, adapter) if loaded else Arrival("", AdapterPending(adapter))

    def unload(self, adapter: LoRAAdapter) -> None:
        """Forget an adapter, so that the next request reads it again."""
        if self.adapters is not None:
            self.adapters.unload(adapter)

    def update(self, source: str, order: UpdateWeightsFromDiskReq) -> Arrival:
        """Check the weights of an update in the background, and return the update's event."""
        if self.weights is not None:
            self.weights.request(order.path)
        return Arrival(source, order)

    def transfer(self, source: str, request: WeightTransferReq, frames: Sequence[Frame]) -> list[Outgoing]:
        """Start a transfer of weights, or return the refusal."""
        if self.transfers is not None:
            self.transfers.request(source, request, frames)
            return []
        why = "an encoder keeps the weights that it was started with"
        return [(source, ControlReply(id=request.id, ok=False, message=why))]

    def retain(self, core: Core[Any, Any]) -> None:
        """Drop all that no request of the core needs, except what a cache keeps."""
        if self.grammars is not None:
            self.grammars.retain(core.grammars())
        if self.adapters is not None:
            self.adapters.retain(core.adapters())
        if self.weights is not None:
            self.weights.retain(())
        for each in (self.images, self.audio):
            if each is not None:
                each.retain(core.media())

    def _weights_read(self, weights: AsyncLoader[str, None], path: str) -> Arrival:
        error = weights.error_of(path)
        if error and self.transfers is not None:
            self.transfers.on_refused(Path(path))
        return Arrival("", WeightsRead(path, error))


def _grammar_read(loader: AsyncLoader[Grammar, object], grammar: Grammar) -> Arrival:
    return Arrival("", GrammarRead(grammar, loader.error_of(grammar)))


def _adapter_read(loader: AsyncLoader[LoRAAdapter, LoadedAdapter], adapter: LoRAAdapter) -> Arrival:
    loaded = loader.value_of(adapter)
    return Arrival("", AdapterRead(adapter, loader.error_of(adapter), "" if loaded is None else loaded.sha256))
