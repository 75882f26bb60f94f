"""Places of a layer's experts on the ranks of its group."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, slots=True)
class Placement:
    """The experts that each rank holds, in ascending order. An expert may be on several ranks.

    Place `p` of a rank `r` has the number `r * width + p`: every rank has as many numbers as the one with most experts.
    """

    held: tuple[tuple[int, ...], ...]

    @classmethod
    def even(cls, experts: int, ranks: int) -> "Placement":
        """Give each rank a run of experts, some of them one more. Raise ValueError for fewer experts than ranks."""
        if experts < ranks:
            raise ValueError(f"{experts} experts cannot be placed on {ranks} ranks: lower --expert-parallel-size")
        starts = [rank * experts // ranks for rank in range(ranks + 1)]
        return cls(tuple(tuple(range(*run)) for run in pairwise(starts)))

    @classmethod
    def balanced(cls, loads: Sequence[int], ranks: int, redundant: int = 0) -> "Placement":
        """Give ranks about equal sums of `loads`, one for each expert; the experts with most have a place more.

        There are `redundant` more places than experts. Raise ValueError if ranks have no room for them.
        """
        counts = [1] * len(loads)
        for _ in range(redundant):
            free = [expert for expert, count in enumerate(counts) if count < ranks]
            if not free:
                raise ValueError(f"{redundant} redundant experts: {len(loads)} experts are on all {ranks} ranks before")
            counts[max(free, key=lambda expert: (loads[expert] / counts[expert], -expert))] += 1
        total = sum(counts)
        rooms = [(rank + 1) * total // ranks - rank * total // ranks for rank in range(ranks)]
        held: list[list[int]] = [[] for _ in range(ranks)]
        sums = [0.0] * ranks
        order = sorted(range(len(loads)), key=lambda expert: (-counts[expert], -loads[expert] / counts[expert], expert))
        for expert in order:
            for _ in range(counts[expert]):
                free = [rank for rank in range(ranks) if len(held[rank]) < rooms[rank] and expert not in held[rank]]
                if not free:
                    raise ValueError(
                        f"{redundant} redundant experts find no place on {ranks} ranks: give another number"
                    )
                rank = min(free, key=lambda rank: (sums[rank], len(held[rank]), rank))
                held[rank].append(expert)
                sums[rank] += loads[expert] / counts[expert]
        return cls(tuple(tuple(sorted(each)) for each in held))

    @property
    def width(self) -> int:
        """Numbers of places on each rank."""
        return max(map(len, self.held))

    @property
    def experts(self) -> list[int]:
        """The expert of each place, in the order of numbers; -1 for a number without place."""
        return [number for held in self.held for number in (*held, *[-1] * (self.width - len(held)))]

    def places_from(self, rank: int) -> torch.Tensor:
        """Return the number of the place of each expert that tokens of a rank use, int64.

        It is on that rank if possible; otherwise ranks are divided among the places of an expert.
        """
        return torch.tensor([_chosen(places, rank, self.width) for places in self._places()])

    def by_expert(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum of the numbers of each expert's places."""
        return [sum(numbers[place] for place in places) for places in self._places()]

    def _places(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(1 + max(map(max, self.held)))]
        for place, expert in enumerate(self.experts):
            if expert >= 0:
                found[expert].append(place)
        return found


def _chosen(places: Sequence[int], rank: int, width: int) -> int:
    own = [place for place in places if place // width == rank]
    return own[0] if own else places[rank % len(places)]
