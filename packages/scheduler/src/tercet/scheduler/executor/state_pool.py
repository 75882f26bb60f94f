"""The state pool: recurrent states of all slots, and snapshots of them, for each recurrent layer."""

from collections.abc import Mapping, Sequence

import torch

from tercet.kernels.ops.recurrent import Segment, Segments
from tercet.scheduler.core.plan import Plan, StateSnapshot
from tercet.scheduler.executor.kv_pool import zeros
from tercet.scheduler.models.config.recurrent_config import StateTensor


class StatePool:
    """States [slots + snapshots, ...] of every recurrent layer. Snapshot n is state `slots + n`."""

    def __init__(
        self,
        layers: Mapping[int, Sequence[StateTensor]],
        slots: int,
        snapshots: int,
        device: torch.device,
        first: int = 0,
    ) -> None:
        """Create the states of `slots` slots from the `first` on."""
        self.snapshots = snapshots
        self._slots = slots
        self._first = first
        self._layers = {
            layer: tuple(zeros((slots + snapshots, *shape), dtype, device) for shape, dtype in tensors)
            for layer, tensors in layers.items()
        }

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the pool."""
        return [tensor for tensors in self._layers.values() for tensor in tensors]

    @property
    def bytes(self) -> int:
        """Size of the pool in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def layer(self, layer_id: int) -> tuple[torch.Tensor, ...]:
        """Return the state tensors of a layer."""
        return self._layers[layer_id]

    def begin(self, plan: Plan) -> Segments:
        """Prepare the states of a plan's rows for its forward pass, and return the segments of its tokens."""
        slots = [row.slot - self._first for row in plan.rows]
        if new := [slot for slot, row in zip(slots, plan.rows, strict=True) if row.start == 0]:
            for tensors in self._layers.values():
                for tensor in tensors:
                    tensor[new] = 0
        self._copy([(self._slots + each.snapshot, each.slot - self._first) for each in plan.restores])
        self._copy([(slots[each.row], self._slots + each.snapshot) for each in plan.snapshots if not each.tokens])
        return self._segments(plan, slots)

    def _segments(self, plan: Plan, states: Sequence[int]) -> Segments:
        """Return the segments of a plan's tokens, given the state of each row.

        Draft tokens continue the sequences of decodes before them.
        """
        singles = _leading_decodes(plan)
        device = next(iter(self._layers.values()))[0].device
        taken: dict[int, list[StateSnapshot]] = {}
        for each in plan.snapshots:
            if each.tokens:
                taken.setdefault(each.row, []).append(each)
        rest: list[Segment] = []
        begin = singles
        for index, row in enumerate(plan.rows[singles:], singles):
            end = begin + row.count
            for each in taken.get(index, ()):
                rest.append(Segment(begin, end - row.count + each.tokens, states[index], self._slots + each.snapshot))
                begin = rest[-1].end
            if begin < end:
                rest.append(Segment(begin, end, states[index]))
            begin = end
        slots = torch.tensor(states[:singles], dtype=torch.int64)
        of_singles = (each for row, of_row in taken.items() if row < singles for each in of_row)
        return Segments(slots, rest, [(each.row, self._slots + each.snapshot) for each in of_singles], device)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states: (source, target) each. No target is a source."""
        for source, target in pairs:
            for tensors in self._layers.values():
                for tensor in tensors:
                    tensor[target].copy_(tensor[source])


def _leading_decodes(plan: Plan) -> int:
    """Return the number of rows with one token before the first with several, or with a draft token."""
    rows = enumerate(plan.rows)
    return next((index for index, row in rows if row.count > 1 or index in plan.draft_tokens), len(plan.rows))
