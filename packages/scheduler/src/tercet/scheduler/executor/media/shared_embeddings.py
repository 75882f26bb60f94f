"""Embeddings of a step's images in all ranks of a model."""

import torch

from tercet.scheduler.models.layers.shard import Collectives

_UNKNOWN = 1 << 30


class SharedEmbeddings:
    """Embeddings that rank 0, which alone has the vision tower, sends to the others in each step with images.

    Every rank knows from the plan in which steps that is, and how many embeddings there are.
    """

    def __init__(self, collectives: Collectives, dtype: torch.dtype, device: torch.device) -> None:
        self._collectives = collectives
        self._dtype, self._device = dtype, device
        self._width = 0

    def share(self, count: int, vectors: torch.Tensor | None) -> torch.Tensor:
        """Return rank 0's vectors [count, width] in every rank; those of the others are None."""
        if not self._width:
            self._width = self._collectives.all_reduce_min(_UNKNOWN if vectors is None else vectors.shape[1])
        if vectors is None:
            vectors = torch.empty(count, self._width, dtype=self._dtype, device=self._device)
        return self._collectives.broadcast(vectors.to(self._dtype))
