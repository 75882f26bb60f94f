"""The state pool: recurrent states of all slots, and snapshots of them, for each recurrent layer."""

from collections.abc import Mapping, Sequence

import torch

from tercet.kernels.ops.recurrent import Segment, Segments
from tercet.scheduler.core.plan import Plan, Row, StateSnapshot
from tercet.scheduler.executor.kv_pool import zeros
from tercet.scheduler.models.config.recurrent_config import StateTensor


class StatePool:
    """States [slots + snapshots, ...] of every recurrent layer. Snapshot n is state `slots + n`."""

    def __init__(
        self, layers: Mapping[int, Sequence[StateTensor]], slots: int, snapshots: int, device: torch.device
    ) -> None:
        self.snapshots = snapshots
        self._slots = slots
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
        if new := [row.slot for row in plan.rows if row.start == 0]:
            for tensors in self._layers.values():
                for tensor in tensors:
                    tensor[new] = 0
        self._copy([(self._slots + each.snapshot, each.slot) for each in plan.restores])
        slots = [row.slot for row in plan.rows]
        self._copy([(slots[each.row], self._slots + each.snapshot) for each in plan.snapshots if not each.tokens])
        return self._segments(plan)

    def end(self, plan: Plan) -> None:
        """Take the snapshots of rows with one token, after the forward pass."""
        singles = _leading_singles(plan.rows)
        taken = [each for each in plan.snapshots if each.row < singles and each.tokens]
        self._copy([(plan.rows[each.row].slot, self._slots + each.snapshot) for each in taken])

    def _segments(self, plan: Plan) -> Segments:
        singles = _leading_singles(plan.rows)
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
                rest.append(Segment(begin, end - row.count + each.tokens, row.slot, self._slots + each.snapshot))
                begin = rest[-1].end
            if begin < end:
                rest.append(Segment(begin, end, row.slot))
            begin = end
        slots = [row.slot for row in plan.rows[:singles]]
        return Segments(torch.tensor(slots, dtype=torch.int64, device=device), rest)

    def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy states: (source, target) each. No target is a source."""
        for source, target in pairs:
            for tensors in self._layers.values():
                for tensor in tensors:
                    tensor[target].copy_(tensor[source])


def _leading_singles(rows: Sequence[Row]) -> int:
    """Return the number of rows with one token before the first with several."""
    return next((index for index, row in enumerate(rows) if row.count > 1), len(rows))
