"""The tokens that a rank routes to experts: all of them, its share with expert parallelism, or its requests' tokens."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

import torch

from tercet.scheduler.models.layers.expert_parallel.dispatch import AllToAll, AllToAllDispatcher
from tercet.scheduler.models.layers.expert_parallel.group import ExpertGroup
from tercet.scheduler.models.layers.expert_parallel.placement import Placement
from tercet.scheduler.models.layers.shard import AttentionRanks, Shard

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Computes held experts: (x [rows, hidden], weights [rows, top_k], experts int64 [rows, top_k]) -> weighted sums."""


class ExpertTokens(Protocol):
    """The interface of a mixture to the hidden states [tokens, hidden] of the tokens of a step that this rank has."""

    @property
    def held(self) -> tuple[int, ...]:
        """The experts that this rank holds."""
        ...

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens that this rank routes, maybe none."""
        ...

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Return the weighted sums of the experts of own tokens, on any rank."""
        ...

    def whole(self, out: torch.Tensor, count: int) -> torch.Tensor:
        """Return the outputs of all `count` tokens, given those of own tokens."""
        ...


class ReplicatedTokens:
    """Tensor parallelism alone: every rank routes all tokens, and has columns of every expert."""

    def __init__(self, shard: Shard, experts: int) -> None:
        self._shard = shard
        self.held = tuple(range(experts))

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return all tokens."""
        return x

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Compute this rank's columns of the experts."""
        return compute(x, weights, experts)

    def whole(self, out: torch.Tensor, count: int) -> torch.Tensor:  # noqa: ARG002
        """Sum over all ranks."""
        return self._shard.collectives.all_reduce(out)


class DispatchedTokens:
    """Expert parallelism: each group of ranks routes a run of the tokens, and has some experts.

    The ranks of a group have columns of the same experts, and route the same tokens. Attention ranks route all tokens
    that they have, because no other rank has these.
    """

    def __init__(self, shard: Shard, layer: int, experts: int) -> None:
        self._shard = shard
        self._group: ExpertGroup = shard.experts
        self._layer = layer
        self._number = shard.expert_group
        self._divides = shard.attention.size == 1
        self._placement: Placement = self._group.placement(layer, experts)
        self._places = torch.tensor(0)
        self.held = self._placement.held[self._number]

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """Return a run of the tokens, or all if no other rank has them."""
        if not self._divides:
            return x
        share = -(-len(x) // self._group.size)
        return x[self._number * share : (self._number + 1) * share]

    def mixed(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, compute: Compute) -> torch.Tensor:
        """Send tokens to their experts, compute those that arrive, and send the results back."""
        dispatcher, width = self._group.dispatcher, self._placement.width
        if dispatcher is None:
            raise TypeError("experts are on other ranks, to which there is no connection")
        if self._places.ndim == 0:
            self._places = self._placement.places_from(self._number).to(x.device)
        given = dispatcher.dispatch(x, weights, self._places[experts], width)
        self._group.loads.add(self._layer, self._placement, given.loads)
        return dispatcher.combine(_computed(given.x, given.weights, given.places, compute), given.handle)

    def whole(self, out: torch.Tensor, count: int) -> torch.Tensor:
        """Gather the runs of all groups; sum over the ranks of a group."""
        if not self._divides:
            return out
        size, share, hidden = self._group.size, -(-count // self._group.size), out.shape[1]
        rows = out.new_zeros(share, hidden)
        rows[: len(out)] = out
        gathered = self._shard.collectives.all_gather(rows.view(1, -1)).view(size, -1, share, hidden)
        if gathered.shape[1] > 1:
            gathered = gathered.float().sum(1).to(out.dtype)
        return gathered.reshape(size * share, hidden)[:count]


def _computed(x: torch.Tensor, weights: torch.Tensor, places: torch.Tensor, compute: Compute) -> torch.Tensor:
    """Return each row's sum over the experts that are here, i.e. whose `places` are not -1."""
    places, order = places.long().sort(1, descending=True)
    held, weights = places.T >= 0, weights.gather(1, order).T  # the first held expert of each row, then the second
    _, rows = held.nonzero(as_tuple=True)
    sums = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if not len(rows):
        return sums.to(x.dtype)
    out = compute(x[rows], weights[held][:, None], places.T[held][:, None])
    counts = held.sum(1).tolist()
    for which, part in zip(torch.split(rows, counts), torch.split(out, counts), strict=True):
        sums[which] += part  # a row is in each part once
    return sums.to(x.dtype)


def tokens_of(shard: Shard, layer: int, experts: int) -> ExpertTokens:
    """Return the tokens of a layer with so many experts."""
    return ReplicatedTokens(shard, experts) if shard.experts.size == 1 else DispatchedTokens(shard, layer, experts)


def with_experts(
    shard: Shard, size: int, all_to_all: AllToAll | None = None, placements: Mapping[int, Placement] = {}
) -> Shard:
    """Return a shard whose ranks form `size` groups, each with some experts. Without an all-to-all it cannot compute.

    Raise ValueError if ranks cannot form so many groups.
    """
    if shard.size % size:
        raise ValueError(
            f"--expert-parallel-size {size} must divide --tensor-parallel-size {shard.size}: experts are placed on its "
            "ranks"
        )
    if size == 1:
        return shard
    dispatcher = None
    if all_to_all is not None:
        columns = shard.size // size
        ranks = range(shard.rank % columns, shard.size, columns)
        own = shard.rank // columns
        dispatcher = AllToAllDispatcher(all_to_all, shard.collectives.all_gather, ranks, shard.size, own)
    return replace(shard, experts=ExpertGroup(size, dispatcher, placements))


def with_attention_ranks(
    shard: Shard, all_to_all: AllToAll | None = None, placements: Mapping[int, Placement] = {}
) -> Shard:
    """Return a shard that is whole except for experts, of which each rank has some.

    Without an all-to-all it cannot compute. Raise ValueError for several pipeline stages.
    """
    if shard.stage.count > 1:
        raise ValueError("--enable-dp-attention does not work with --pipeline-parallel-size: leave one of them out")
    size, collectives = shard.size, shard.collectives
    dispatcher = None
    if all_to_all is not None:
        dispatcher = AllToAllDispatcher(all_to_all, collectives.all_gather, range(size), size, shard.rank)
    ranks = AttentionRanks(shard.rank, size, collectives, all_to_all)
    return Shard(experts=ExpertGroup(size, dispatcher, placements), attention=ranks)
