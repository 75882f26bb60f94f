"""A model wrapper that computes a step in parts if it does not fit in memory."""

from collections.abc import Callable

import torch

from tercet.scheduler.device.oom import SplitOnOom, again, release_cached
from tercet.scheduler.executor.forward_batch import ForwardBatch
from tercet.scheduler.executor.model_runner import Model


class OomChunkedModel:
    """A wrapper of a `Model`. After an out-of-memory error, steps of that size are split into halves for a while.

    A step may be computed twice, which is harmless: the same keys and values are written again.
    """

    def __init__(self, model: Model, release: Callable[[], None] = release_cached) -> None:
        self._model = model
        self._release = release
        self._in_halves = SplitOnOom("tokens of a step", release)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """See `Model`. Raise the model's error if even one token does not fit."""
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
