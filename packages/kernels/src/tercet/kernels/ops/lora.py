"""Low-rank adapters (LoRA, arXiv:2106.09685) of a linear layer. Each token may have a different adapter, or none.

An adapter adds x @ a.T @ b to x @ weight.T; its scale is part of b. Two tensors hold the adapters of all slots.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

LONGEST_RUN = 64
"""Maximum number of tokens of one `Segment`: a kernel reads an adapter once for each segment."""

FEW_TOKENS = 16
"""Maximum number of tokens of a segment where few tokens have adapters: the minimum rows of a tensor core."""


class Segment(NamedTuple):
    """Tokens [start, stop) of a step, or of an order of its tokens, that use the adapter in one slot."""

    slot: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class LoRAWeights:
    """Adapters of one layer, zero-padded beyond the rank of each and in empty slots."""

    a: torch.Tensor  # [slots, parts * rank, inputs]
    b: torch.Tensor  # [slots, rank, outputs]
    parts: tuple[int, ...]
    """Outputs of each projection that the layer fuses; each has `rank` rows of `a`."""

    @property
    def rank(self) -> int:
        """Maximum rank of an adapter."""
        return self.b.shape[1]


@dataclass(frozen=True, eq=False)
class LoRARows:
    """Tokens of a step that have an adapter."""

    runs: Sequence[Segment] | None
    """Segments in the order of tokens, without overlap. None in a CUDA graph, where only `table` has them."""
    table: torch.Tensor  # int32 [segments, 3]: segments of `order`, on the device of the weights
    ranks: Sequence[int]
    """Rank of the adapter in each slot."""
    longest: int = LONGEST_RUN
    """Maximum number of tokens of a segment, including those of the table."""
    order: torch.Tensor | None = None
    """int32 [tokens]: tokens sorted by adapter, so that a kernel reads each adapter once for many; None if the table
    counts the tokens of the step."""

    @property
    def known(self) -> Sequence[Segment]:
        """The segments. Raises RuntimeError if only the table has them."""
        if self.runs is None:
            raise RuntimeError("only a kernel can read which tokens have adapters")
        return self.runs

    def part(self, tokens: slice) -> "LoRARows | None":
        """Return the segments within `tokens`, relative to its start, or None without any. Raises as `known` does."""
        first, last = tokens.start, tokens.stop
        cut = [Segment(slot, max(start, first) - first, min(stop, last) - first) for slot, start, stop in self.known]
        runs = [run for run in cut if run.start < run.stop]
        if not runs:
            return None
        table = torch.tensor(runs, dtype=torch.int32).to(self.table.device)
        part = LoRARows(runs, table, self.ranks, self.longest)
        return part if self.order is None else part.sorted_by_slot(last - first)

    def sorted_by_slot(self, tokens: int) -> "LoRARows":
        """Return the segments with a table of sorted tokens, for a step of so many. Raises as `known` does."""
        slots = np.full(tokens, -1, dtype=np.int64)
        for slot, start, stop in self.known:
            slots[start:stop] = slot
        table, order, longest = grouped(slots)
        device = self.table.device
        placed = torch.from_numpy(table).to(device), torch.from_numpy(order).to(device)
        return LoRARows(self.runs, placed[0], self.ranks, longest, placed[1])

    @cached_property
    def by_slot(self) -> dict[int, torch.Tensor | slice]:
        """Tokens of each slot: a slice if they are contiguous, otherwise an int64 index. Raises as `known` does."""
        tokens: dict[int, list[int]] = {}
        for slot, start, stop in self.known:
            tokens.setdefault(slot, []).extend(range(start, stop))
        return {slot: _index(found, self.table.device) for slot, found in tokens.items()}


def grouped(slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], int]:
    """Return (table, order, longest) of a `LoRARows` for the adapter slot of each token, -1 for none."""
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    most, runs, start = longest_segment(len(slots)), list[Segment](), 0
    for slot, count in zip(*map(np.ndarray.tolist, np.unique(slots[order], return_counts=True)), strict=True):
        stop = start + count
        runs += [Segment(slot, begin, min(begin + most, stop)) for begin in range(start, stop, most)]
        start = stop
    return np.array(runs, dtype=np.int32).reshape(-1, 3), order.astype(np.int32), most


def longest_segment(tokens: int) -> int:
    """Return the maximum tokens of a segment of a sorted step."""
    return LONGEST_RUN if tokens >= LONGEST_RUN else FEW_TOKENS


def most_segments(tokens: int, slots: int) -> int:
    """Return the maximum number of segments of `grouped` for so many tokens and adapter slots."""
    return min(tokens, slots + tokens // longest_segment(tokens))


def add_lora(out: torch.Tensor, x: torch.Tensor, weights: LoRAWeights, rows: LoRARows) -> None:
    """Add each token's x [tokens, inputs] @ a.T @ b, in float32, to out [tokens, outputs] in place."""
    for slot, tokens in rows.by_slot.items():
        rank = rows.ranks[slot]
        for outputs, a, b in _parts(weights, slot, rank):
            added = x[tokens].float() @ a.float().T @ b.float()
            out[tokens, outputs] = (out[tokens, outputs].float() + added).to(out.dtype)


def _parts(weights: LoRAWeights, slot: int, rank: int) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield the outputs, the rows of a [rank, inputs] and the columns of b [rank, outputs] of each projection."""
    start = 0
    for index, size in enumerate(weights.parts):
        outputs = slice(start, start + size)
        first = index * weights.rank
        yield outputs, weights.a[slot, first : first + rank], weights.b[slot, :rank, outputs]
        start += size


def _index(tokens: list[int], device: torch.device) -> torch.Tensor | slice:
    if tokens[-1] - tokens[0] + 1 == len(tokens):
        return slice(tokens[0], tokens[-1] + 1)
    return torch.tensor(tokens, device=device)
