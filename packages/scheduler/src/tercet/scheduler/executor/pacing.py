"""Signs of life from steps that take long on a CPU, so that nobody takes them for steps that hang."""

import time
from collections.abc import Callable

import torch
from torch import nn

from tercet.scheduler.executor.forward_batch import ForwardBatch, ForwardMode
from tercet.scheduler.executor.model_runner import Model
from tercet.scheduler.ports import Advance

LONGEST_CALL = 10.0
"""Seconds that one call may be expected to take: a third of what may count as stuck."""
FEW = 4
"""The fewest tokens of a call from which the time of a token is taken. Steps of less than twice as many stay whole."""


def telling(model: Model, advance: Advance) -> Model:
    """A model on a CPU that calls `advance` after each layer, or where one call computes them all, each part of a step.

    Not for an accelerator, which only takes orders in a forward: `advance` would say nothing of what is done.
    """
    if not isinstance(model, nn.Module):
        return TimedChunkedModel(model, advance)
    tell_layers(model, advance)
    return model


def tell_layers(module: nn.Module, advance: Advance) -> None:
    """Have `advance` called after each layer. See `telling`."""
    for layer in _layers(module):
        layer.register_forward_hook(lambda *_: advance())


def _layers(module: nn.Module) -> list[nn.Module]:
    """Those in the outermost lists of modules."""
    if isinstance(module, nn.ModuleList):
        return list(module)
    return [layer for child in module.children() for layer in _layers(child)]


class TimedChunkedModel:
    """A `Model` around one that computes a step in one call, which gives no sign before its end.

    A step is cut in halves if it would take more than `LONGEST_CALL`, by the time of a token in the last call of at
    least `FEW`. A decode can only lower that time: it has few tokens, and reads all weights for them.
    """

    def __init__(self, model: Model, advance: Advance, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._advance = advance
        self._clock = clock
        self._token_seconds = float("inf")

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`."""
        tokens = len(input_ids)
        if tokens >= 2 * FEW and tokens * self._token_seconds > LONGEST_CALL:
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
