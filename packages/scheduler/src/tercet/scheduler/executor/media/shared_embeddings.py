"""Embeddings of a step's images or sounds in all ranks of a model."""

from typing import Protocol

import torch

from tercet.scheduler.models.layers.shard import Collectives, StageLinks

_UNKNOWN = 1 << 30


class Embeddings(Protocol):
    """The interface of what gives a step's embeddings to the ranks that need them.

    Every rank knows from the plan in which steps that is, and how many embeddings there are.
    """

    def share(self, count: int, vectors: torch.Tensor | None) -> torch.Tensor:
        """Return rank 0's vectors [count, width]; those of the other ranks are None."""
        ...


class SharedEmbeddings:
    """Embeddings that rank 0, which alone has the tower, sends to the others in each step with images or sounds."""

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


class StageEmbeddings:
    """Embeddings that rank 0 sends from the last pipeline stage to the ranks of the first one, before its own part.

    Earlier steps never wait for it: rank 0 has computed them. The first stage waits until it has.
    """

    def __init__(self, links: StageLinks, width: int, dtype: torch.dtype, device: torch.device, *, first: bool) -> None:
        self._links, self._first = links, first
        self._none = torch.empty(0, width, dtype=dtype, device=device)

    def share(self, count: int, vectors: torch.Tensor | None) -> torch.Tensor:
        """Return rank 0's vectors in the first stage, and vectors of width 0 in the others."""
        if vectors is not None:
            self._links.send_to_first(vectors.to(self._none.dtype))
        if self._first:
            return self._links.receive_from_last(self._none.new_empty(count, self._none.shape[1]))
        return self._none.new_empty(count, 0)
