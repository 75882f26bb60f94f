"""Tensor and pipeline parallelism: the part of a model that a rank holds, and how ranks communicate.

Each rank holds some heads of every attention, some columns of every MLP and some rows of the vocabulary, and computes
with these only. The outputs of attention and MLP are summed over all ranks (Megatron-LM, arXiv:1909.08053); everything
between two sums is replicated, as are norms, routers and the cache's pages.

With pipeline parallelism, each stage holds a run of layers, and passes the hidden states of a step on to the next stage
(GPipe, arXiv:1811.06965). The first stage has the embedding, the last one the final norm and the head. A shard is then
one of a stage.

With attention by data-parallel ranks, each rank holds everything but experts whole, for requests of its own, and a
shard is whole except for its experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Protocol

import torch
from torch.nn.functional import pad

from tercet.scheduler.models.layers.expert_parallel.dispatch import AllToAll
from tercet.scheduler.models.layers.expert_parallel.group import ExpertGroup


class Collectives(Protocol):
    """The interface of collectives, which every rank calls in the same order and with the same shapes.

    Each returns the same bits in all ranks, and may overwrite its argument.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, of any shape."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate all ranks' x [rows, n] in the order of ranks: [rows, ranks * n]."""
        ...

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's x, of any shape."""
        ...

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest of all ranks' numbers."""
        ...


class SingleRankCollectives:
    """The `Collectives` of a model in one process."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x

    all_gather = broadcast = all_reduce

    def all_reduce_min(self, number: int) -> int:
        """Return the number."""
        return number


class StageLinks(Protocol):
    """The links of a rank to the ranks of the stages before and after it. All run the same steps in the same order."""

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that the stage before sends, of the shape and dtype of `like`."""
        ...

    def send(self, x: torch.Tensor) -> None:
        """Send hidden states to the next stage. They may still be on their way when this returns."""
        ...

    def send_to_first(self, x: torch.Tensor) -> None:
        """Send embeddings from rank 0, which is in the last stage, to all ranks of the first one."""
        ...

    def receive_from_last(self, like: torch.Tensor) -> torch.Tensor:
        """Return the embeddings that rank 0 sends to this rank of the first stage, of the shape and dtype of `like`."""
        ...

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks of all stages."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Pipeline stage `number` of `count`."""

    number: int = 0
    count: int = 1
    links: StageLinks | None = field(default=None, compare=False)

    @property
    def is_first(self) -> bool:
        """Return whether it has the embedding."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Return whether it has the head."""
        return self.number == self.count - 1

    def layers(self, count: int) -> range:
        """Return its layers of `count`: earlier stages have one more if they are not equal."""
        if count < self.count:
            raise ValueError(f"{count} layers cannot be split over {self.count} pipeline stages")
        return range(-(-self.number * count // self.count), -(-(self.number + 1) * count // self.count))

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        """See `StageLinks`. Without links, as while memory is measured, return `like`."""
        return like if self.links is None else self.links.receive(like)

    def send(self, x: torch.Tensor) -> None:
        """See `StageLinks`."""
        if self.links is not None:
            self.links.send(x)


@dataclass(frozen=True, slots=True)
class Split:
    """A split of a model over ranks: pipeline stages of `shards` ranks each."""

    shards: int = 1
    stages: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.shards * self.stages

    def place_of(self, rank: int) -> tuple[int, int]:
        """Return the stage of a rank, and the number of its shard. Rank 0 is in the last stage, which samples."""
        behind, shard = divmod(rank, self.shards)
        return self.stages - 1 - behind, shard


@dataclass(frozen=True, slots=True)
class AttentionRanks:
    """Rank `rank` of `size` that each compute the attention of their own requests, and have parts of the experts."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default=SingleRankCollectives(), compare=False)
    all_to_all: AllToAll | None = field(default=None, compare=False)
    """None while memory is computed."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `rank` of `size` equal shards of a pipeline stage, which is the whole model without pipeline stages."""

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default=SingleRankCollectives(), compare=False)
    stage: Stage = Stage()
    experts: ExpertGroup = field(default=ExpertGroup(), compare=False)
    attention: AttentionRanks = AttentionRanks()

    @property
    def records(self) -> bool:
        """Return whether steps can be recorded in CUDA graphs: they neither pass on states, nor exchange numbers."""
        return self.stage.count == self.experts.size == 1

    @property
    def of_experts(self) -> "Shard":
        """Return the shard of each expert that this rank holds, and of shared experts. It has no collectives."""
        size = max(1, self.size // self.experts.size)
        return Shard(self.rank % size, size)

    @property
    def expert_group(self) -> int:
        """Return the number of the group of experts that this rank holds."""
        return self.rank // self.of_experts.size + self.attention.rank

    @property
    def is_whole(self) -> bool:
        """Return whether it is the whole model."""
        return self.size == self.stage.count == self.attention.size == 1

    def all_reduce_min(self, number: int) -> int:
        """Return the smallest of the numbers of all ranks of the model."""
        links = self.stage.links
        if self.attention.size > 1:
            return self.attention.collectives.all_reduce_min(number)
        return self.collectives.all_reduce_min(number) if links is None else links.all_reduce_min(number)

    def all_equal(self, number: int) -> bool:
        """Return whether the numbers of all ranks of the model are equal, and above 0."""
        return self.all_reduce_min(number) == -self.all_reduce_min(-number) > 0

    def span(self, count: int, what: str) -> range:
        """Return this rank's range of `count`. Raise ValueError if it does not divide evenly."""
        if count % self.size:
            raise ValueError(f"{count} {what} cannot be split over {self.size} processes")
        share = count // self.size
        return range(self.rank * share, (self.rank + 1) * share)

    def shared_span(self, count: int, what: str) -> range:
        """Return this rank's range; if there are fewer than ranks, several ranks share each."""
        if count < self.size and self.size % count == 0:
            which = self.rank * count // self.size
            return range(which, which + 1)
        return self.span(count, what)

    def uneven_span(self, count: int) -> range:
        """Return this rank's range of a count that need not divide evenly: the last ranks hold less."""
        share = -(-count // self.size)
        return range(min(self.rank * share, count), min((self.rank + 1) * share, count))

    def gather_columns(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Gather all columns of `uneven_span`s of `count`: [rows, share] -> [rows, count]."""
        if self.size == 1:
            return x
        share = -(-count // self.size)
        whole = self.collectives.all_gather(pad(x, (0, share - x.shape[1])))
        return whole[:, :count].contiguous()


WHOLE = Shard()
"""The whole model in one process."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The ranges of one dimension of a stored tensor that a rank holds."""

    whole: int
    """Size of the dimension in the stored tensor."""
    runs: tuple[range, ...]
    dim: int = 0

    @classmethod
    def span(cls, count: int, held: range, each: int = 1, dim: int = 0) -> "Cut":
        """Create the cut of items in `held`, of `count` items with `each` elements."""
        return cls(count * each, (range(held.start * each, held.stop * each),), dim)

    @classmethod
    def items(cls, count: int, held: Sequence[int]) -> "Cut":
        """Create the cut of single elements, in ascending order."""
        starts = [index for index, item in enumerate(held) if not index or held[index - 1] + 1 != item]
        runs = (range(held[start], held[end - 1] + 1) for start, end in pairwise((*starts, len(held))))
        return cls(count, tuple(runs))

    @classmethod
    def all(cls, count: int) -> "Cut":
        """Create a cut that keeps everything."""
        return cls(count, (range(count),))

    @classmethod
    def stacked(cls, cuts: Sequence["Cut"]) -> "Cut":
        """Create the cut of a tensor that has tensors one below the other, in their order."""
        return reduce(lambda above, cut: cut.stacked_below(above), cuts)

    @property
    def held(self) -> int:
        """Number of elements that are kept."""
        return sum(map(len, self.runs))

    def along(self, dim: int) -> "Cut":
        """Return the same cut of another dimension."""
        return Cut(self.whole, self.runs, dim)

    def stacked_below(self, other: "Cut") -> "Cut":
        """Return the cut of a tensor that has this one's tensor below the other's."""
        runs = list(other.runs)
        for run in self.runs:
            begin = runs.pop().start if runs and runs[-1].stop == run.start + other.whole else run.start + other.whole
            runs.append(range(begin, run.stop + other.whole))  # merge adjacent ranges
        return Cut(other.whole + self.whole, tuple(runs), self.dim)

    def within(self, first: int, size: int) -> "Cut":
        """Return the cut of the `size` elements from `first` on, stored as a tensor of their own."""
        runs = (range(max(run.start - first, 0), min(run.stop - first, size)) for run in self.runs)
        return Cut(size, tuple(run for run in runs if run), self.dim)

    def of(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the held part of a stored tensor: a view if it is one range."""
        parts = [stored.narrow(self.dim, run.start, len(run)) for run in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def stored_shape(self, held: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the stored tensor whose held part has the given shape."""
        shape = list(held)
        shape[self.dim] = self.whole
        return tuple(shape)
