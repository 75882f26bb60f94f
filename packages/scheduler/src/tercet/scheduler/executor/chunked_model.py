"""Model wrappers that compute a step in chunks: on lack of memory on a GPU, and for progress reports on a CPU.

The watchdog takes a step without progress reports for a hung one.
"""

import time
from collections.abc import Callable

import torch
from torch import nn

from tercet.scheduler.device.oom import SplitOnOom, again, release_cached
from tercet.scheduler.executor.forward_batch import ForwardBatch, ForwardMode
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.ports import Advance

LONGEST_CALL = 10.0
"""Maximum expected seconds of one call: a third of the time after which a step counts as stuck."""
FEW = 4
"""Minimum tokens of a call from which the time per token is measured. Steps of fewer than twice as many are not
split.
"""


def report_progress(model: Model, advance: Advance) -> Model:
    """Return a model on a CPU that calls `advance` after each layer, or after each part of a step if one call computes
    all layers.

    This is not for an accelerator, whose forward pass only enqueues work: `advance` would report nothing.
    """
    if not isinstance(model, nn.Module):
        return TimedChunkedModel(model, advance)
    report_layers(model, advance)
    return model


def report_layers(module: nn.Module, advance: Advance) -> None:
    """Register hooks that call `advance` after each layer. See `report_progress`."""
    for layer in _layers(module):
        layer.register_forward_hook(lambda *_: advance())


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the modules in the outermost `nn.ModuleList`s."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [layer for child in module.children() for layer in _layers(child)]


class OomChunkedModel:
    """A wrapper of a `Model`. After an out-of-memory error, steps of that size are split into halves for a while.

    A step may be computed twice, which is harmless: the same keys and values are written again. Recurrent states would
    advance twice, so a step over them is not repeated. A step whose images cannot be cut is not split.
    """

    def __init__(self, model: Model, release: Callable[[], None] = release_cached) -> None:
        self._model = model
        self._release = release
        self._in_halves = SplitOnOom("tokens of a step", release)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`. Raise the model's error if even one token does not fit, or if a step cannot be repeated."""
        if batch.segments is not None or not batch.can_be_cut:
            return self._model(input_ids, positions, batch)
        tokens = len(input_ids)

        def run(some: slice) -> torch.Tensor:
            if some.stop - some.start == tokens:
                return self._model(input_ids, positions, batch)
            part = batch.part(some)
            return self._model(part.input_ids, part.positions, part)

        parts = self._in_halves(run, slice(0, tokens))
        return parts[0] if len(parts) == 1 else again(lambda: torch.cat(parts), self._release)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`. On lack of memory, retry after releasing torch's cached memory."""
        return again(lambda: self._model.compute_logits(hidden), self._release)


class TimedChunkedModel:
    """A wrapper of a `Model` that computes a step in one call and reports no progress before its end.

    A step is split into halves if it would take more than `LONGEST_CALL`, by the time per token of the last call with
    at least `FEW` tokens. A decode can only lower that time: it has few tokens and reads all weights for them.
    """

    def __init__(self, model: Model, advance: Advance, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._advance = advance
        self._clock = clock
        self._token_seconds = float("inf")

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`."""
        tokens = len(input_ids)
        if tokens >= 2 * FEW and tokens * self._token_seconds > LONGEST_CALL and batch.can_be_cut:
            cut = tokens // 2
            return torch.cat([self._part(batch, half) for half in (slice(0, cut), slice(cut, tokens))])
        began = self._clock()
        hidden = self._model(input_ids, positions, batch)
        if tokens >= FEW:
            seconds, known = (self._clock() - began) / tokens, self._token_seconds
            self._token_seconds = min(seconds, known) if batch.mode is ForwardMode.DECODE else seconds
        self._advance()
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model`."""
        logits = self._model.compute_logits(hidden)
        self._advance()
        return logits

    def _part(self, batch: ForwardBatch, tokens: slice) -> torch.Tensor:
        part = batch.part(tokens)
        return self(part.input_ids, part.positions, part)
