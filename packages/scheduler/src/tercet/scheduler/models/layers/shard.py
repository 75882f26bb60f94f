"""Tensor parallelism: which part of a model a process holds, and what the processes of a model do together.

Each holds some heads of every attention, some columns of every MLP and some rows of the vocabulary, and computes with
them alone. What attention and MLP give is the sum over all processes (Megatron-LM, arXiv:1909.08053); what is between
two sums is the same everywhere, and so are norms, routers and the cache's pages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn.functional import pad


class Collectives(Protocol):
    """What every process of a model calls, in the same order and with tensors of the same shapes.

    Each gives the same bits everywhere, and may write over what it is given.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, of any shape."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' x [rows, n] side by side, in their order: [rows, ranks * n]."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Rank 0's x, of any shape."""
        ...

    def smallest(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        ...


class SingleRankShard:
    """The `Collectives` of a model in one process."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """All there is."""
        return x

    all_gather = broadcast = all_reduce

    def smallest(self, number: int) -> int:
        """The only one."""
        return number


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal parts of everything that is split."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default=SingleRankShard(), compare=False)

    def span(self, count: int, what: str) -> range:
        """Which of `count` this process holds. Raises ValueError when they do not divide evenly."""
        if count % self.size:
            raise ValueError(f"{count} {what} cannot be split over {self.size} processes")
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def shared_span(self, count: int, what: str) -> range:
        """The same where fewer than there are processes may each be held by several."""
        if count < self.size and self.size % count == 0:
            which = self.rank * count // self.size
            return range(which, which + 1)
        return self.span(count, what)

    def uneven_span(self, count: int) -> range:
        """The same of what need not divide evenly: the last processes hold less."""
        share = -(-count // self.size)
        return range(min(self.rank * share, count), min((self.rank + 1) * share, count))

    def joined(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """All columns of which each process has its `uneven_span` of `count`: [rows, share] -> [rows, count]."""
        if self.size == 1:
            return x
        share = -(-count // self.size)
        whole = self.collectives.all_gather(pad(x, (0, share - x.shape[1])))
        return whole[:, :count].contiguous()


WHOLE = Shard()
"""Everything in one process."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What a process holds of one dimension of a stored tensor: runs of it, one after another."""

    whole: int
    """Elements of that dimension when stored."""
    runs: tuple[range, ...]
    dim: int = 0

    @classmethod
    def span(cls, count: int, held: range, each: int = 1, dim: int = 0) -> "Cut":
        """Some of `count` that take `each` so many elements."""
        return cls(count * each, (range(held.start * each, held.stop * each),), dim)

    @classmethod
    def all(cls, count: int) -> "Cut":
        """Nothing is left out."""
        return cls(count, (range(count),))

    @property
    def held(self) -> int:
        """Elements of the dimension that are kept."""
        return sum(map(len, self.runs))

    def along(self, dim: int) -> "Cut":
        """The same of another dimension."""
        return Cut(self.whole, self.runs, dim)

    def below(self, other: "Cut") -> "Cut":
        """Of what lies below what another is of, in one tensor: both."""
        runs = list(other.runs)
        for run in self.runs:
            begin = runs.pop().start if runs and runs[-1].stop == run.start + other.whole else run.start + other.whole
            runs.append(range(begin, run.stop + other.whole))  # one with what it adjoins
        return Cut(other.whole + self.whole, tuple(runs), self.dim)

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """What is held of a stored tensor: a view, if it is one run."""
        parts = [stored.narrow(self.dim, run.start, len(run)) for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def stored_shape(self, held: Sequence[int]) -> tuple[int, ...]:
        """The shape of the stored tensor of which what is held has that shape."""
        shape = list(held)
        shape[self.dim] = self.whole
        return tuple(shape)
