"""Low-rank adapters (LoRA, arXiv:2106.09685) of a linear layer: tokens of one step may each have another, or none.

What an adapter adds to x @ weight.T is x @ a.T @ b, its scale being part of b. Every adapter has a *place* in two
tensors that hold those of all.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

LONGEST_RUN = 64
"""Tokens of one `Segment`, at most: a kernel reads an adapter once for each run."""


class Segment(NamedTuple):
    """Tokens [start, stop) of a step, all of whom have the adapter at one place."""

    place: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """The adapters of one layer, zero beyond the rank of each, and at places without one."""

    a: torch.Tensor  # [places, parts * rank, inputs]
    b: torch.Tensor  # [places, rank, outputs]
    parts: tuple[int, ...]
    """Outputs of each of the projections that the layer is made of; each has `rank` rows of `a` to itself."""

    @property
    def rank(self) -> int:
        """The highest that an adapter can have."""
        return self.b.shape[1]


@dataclass(frozen=True, eq=False)
class LoRARows:
    """Which tokens of a step have an adapter."""

    runs: Sequence[Segment] | None
    """In the order of tokens, without overlap. None in a CUDA graph, where `table` alone says them."""
    table: torch.Tensor  # int32 [runs, 3]: the same, where the weights are
    ranks: Sequence[int]
    """Rank of the adapter at each place."""
    longest: int = LONGEST_RUN
    """Tokens of a run, at most, those of the table among them."""

    @property
    def known(self) -> Sequence[Segment]:
        """The runs. Raises RuntimeError where the table alone says which they are."""
        if self.runs is None:
            raise RuntimeError("only a kernel can read which tokens have adapters")
        return self.runs

    def part(self, tokens: slice) -> "LoRARows | None":
        """The runs within `tokens`, counted from its start; None if there are none. Raises as `known` does."""
        first, last = tokens.start, tokens.stop
        cut = [Segment(place, max(start, first) - first, min(stop, last) - first) for place, start, stop in self.known]
        runs = [run for run in cut if run.start < run.stop]
        if not runs:
            return None
        table = torch.tensor(runs, dtype=torch.int32).to(self.table.device)
        return LoRARows(runs, table, self.ranks, self.longest)

    @cached_property
    def by_place(self) -> dict[int, torch.Tensor | slice]:
        """Each place's tokens: an int64 index, or a slice where they are neighbours. Raises as `known` does."""
        tokens: dict[int, list[int]] = {}
        for place, start, stop in self.known:
            tokens.setdefault(place, []).extend(range(start, stop))
        return {place: _index(found, self.table.device) for place, found in tokens.items()}


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, rows: LoRARows) -> None:
    """Add to out [tokens, outputs], in place, each token's x [tokens, inputs] @ a.T @ b, computed in float32."""
    for place, tokens in rows.by_place.items():
        rank = rows.ranks[place]
        for outputs, a, b in _parts(weights, place, rank):
            added = x[tokens].float() @ a.float().T @ b.float()
            out[tokens, outputs] = (out[tokens, outputs].float() + added).to(out.dtype)


def _parts(weights: LoRAWeights, place: int, rank: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Of each projection: its outputs, its rows of a [rank, inputs], its columns of b [rank, outputs]."""
    start = 0
    for index, size in enumerate(weights.parts):
        outputs = slice(start, start + size)
        first = index * weights.rank
        yield outputs, weights.a[place, first : first + rank], weights.b[place, :rank, outputs]
        start += size


def _index(tokens: list[int], device: torch.device) -> torch.Tensor | slice:
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(tokens[0], tokens[-1] + 1)
    return torch.tensor(tokens, device=device)
