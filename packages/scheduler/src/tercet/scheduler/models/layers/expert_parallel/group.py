"""The ranks among which the experts of a model are divided."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from tercet.scheduler.models.layers.expert_parallel.dispatch import ExpertDispatcher
from tercet.scheduler.models.layers.expert_parallel.placement import Placement


class ExpertLoads:
    """Numbers of (token, expert) pairs that each layer's experts computed since start, of the tokens of all ranks."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Placement, torch.Tensor]] = {}

    def add(self, layer: int, placement: Placement, loads: torch.Tensor) -> None:
        """Add the loads of a layer's places, int64 on the CPU."""
        if layer not in self._layers:
            self._layers[layer] = placement, torch.zeros_like(loads)
        self._layers[layer][1].add_(loads)

    def counts(self) -> dict[int, list[int]]:
        """Return the number of each expert by the number of its layer."""
        return {
            layer: placement.by_expert(total.tolist()) for layer, (placement, total) in sorted(self._layers.items())
        }


@dataclass(frozen=True, slots=True, eq=False)
class ExpertGroup:
    """Expert parallelism of a shard: its ranks form `size` groups, each with some experts of every mixture."""

    size: int = 1
    dispatcher: ExpertDispatcher | None = None
    """None while memory is computed."""
    placements: Mapping[int, Placement] = field(default_factory=dict)
    """Layers whose experts are not divided evenly."""
    loads: ExpertLoads = field(default_factory=ExpertLoads)

    def placement(self, layer: int, experts: int) -> Placement:
        """Return the places of a layer's experts. Raise ValueError if there are fewer experts than groups."""
        placement = self.placements.get(layer) or Placement.even(experts, self.size)
        if (found := 1 + max(map(max, placement.held))) != experts:
            raise ValueError(f"layer {layer} has {experts} experts, not {found} as in the file of expert loads")
        return placement
