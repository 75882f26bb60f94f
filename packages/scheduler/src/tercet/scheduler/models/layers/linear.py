"""Matrices and linear layers, whole or one rank's shard."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.projection import Weight
from tercet.kernels.ops.quantized import QuantizedWeight, dequantize
from tercet.scheduler.models.layers.layer_ops import OpsModule
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.shard import Cut, Shard


class MappedRows(NamedTuple):
    """Rows of a weight in another place, such as a memory-mapped file."""

    rows: torch.Tensor | QuantizedWeight
    taken: Callable[[], None]
    """Callback after the rows are read."""

    def in_full(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows in a dtype."""
        return dequantize(self.rows, dtype) if isinstance(self.rows, QuantizedWeight) else self.rows.to(dtype)


def _split(rows: torch.Tensor | QuantizedWeight, runs: Sequence[int]) -> Sequence[torch.Tensor | QuantizedWeight]:
    if isinstance(rows, torch.Tensor):
        return torch.split(rows, list(runs))
    ends, columns = list(accumulate(runs)), range(rows.shape[1])
    return [rows.part(range(end - run, end), columns) for run, end in zip(runs, ends, strict=True)]


class Matrix(OpsModule):
    """A module with a weight [outputs, inputs], made of one or more runs of rows.

    Code that packs weights in its own layout takes them out of the module. Until then they may stay in their mapped
    files, so that no weight is copied without need.
    """

    def __init__(self, inputs: int, runs: Sequence[int], dtype: torch.dtype, device: str | None = None) -> None:
        super().__init__()
        self.weight = empty_parameter(sum(runs), inputs, dtype=dtype, device=device)
        self._runs = list(runs)
        self._mapped: dict[int, MappedRows] = {}

    def set_mapped(self, run: int | None, mapped: MappedRows) -> None:
        """Leave a run of rows in its place, in any dtype, until the weight is taken; None: all runs together."""
        if run is not None:
            self._mapped[run] = mapped
            return
        for index, rows in enumerate(_split(mapped.rows, self._runs)):
            last = index == len(self._runs) - 1
            self._mapped[index] = MappedRows(rows, mapped.taken if last else nothing)

    def take(self) -> list[torch.Tensor]:
        """Return the runs of rows in the weight's dtype, and remove them from the module."""
        runs = list(torch.split(self.weight.data, self._runs))
        for index, mapped in self._mapped.items():
            runs[index] = mapped.in_full(self.weight.dtype)
            mapped.taken()
        self._mapped.clear()
        self.weight.data = torch.empty(0)
        return runs

    def take_blocks(self) -> list[QuantizedWeight] | None:
        """Return the runs of rows if all are quantized, and remove them from the module; None otherwise."""
        lent = [self._mapped.get(index) for index in range(len(self._runs))]
        runs = [mapped.rows for mapped in lent if mapped is not None and isinstance(mapped.rows, QuantizedWeight)]
        if len(runs) != len(lent):
            return None
        for mapped in self._mapped.values():
            mapped.taken()
        self._mapped.clear()
        self.weight.data = torch.empty(0)
        return runs


class Linear(Matrix):
    """A linear layer: x @ weight.T + bias. A quantized model's weight is on the meta device until it is loaded."""

    packable = True
    """The layer computes nothing else, so kernels with their own weight layout may replace it."""

    def __init__(
        self, inputs: int, outputs: int | Sequence[int], *, bias: bool, dtype: torch.dtype, quantized: bool = False
    ) -> None:
        runs = [outputs] if isinstance(outputs, int) else outputs
        super().__init__(inputs, runs, dtype, "meta" if quantized else None)
        self.bias = empty_parameter(sum(runs), dtype=dtype) if bias else None
        self.may_be_quantized = quantized
        self.quantized: QuantizedWeight | None = None
        self.order: torch.Tensor | None = None
        """The checkpoint row of each row, int64 [outputs]; None if they are equal."""

    def process_weights_after_loading(self) -> None:
        """Apply `order`. Lent rows are reordered when they are taken."""
        if self.order is None:
            return
        if self.quantized is not None:
            self.quantized = self.quantized.rows(self.order)
        elif not self._mapped:
            self.weight.data = self.weight.data[self.order]
        if self.bias is not None:
            self.bias.data = self.bias.data[self.order]

    def take(self) -> list[torch.Tensor]:
        """See `Matrix.take`."""
        mapped, runs = bool(self._mapped), super().take()
        if self.order is None or not mapped:
            return runs
        return list(torch.split(torch.cat(runs)[self.order], self._runs))

    @property
    def value(self) -> Weight:
        """The weight that `forward` uses."""
        return self.weight if self.quantized is None else self.quantized

    def forward(self, x: torch.Tensor, *, gate: Gate | None = None) -> torch.Tensor:
        """Return [tokens, outputs] of x [tokens, inputs]. `tercet.kernels.ops.projection` defines this and the
        following.
        """
        return self.ops.project(x, self.value, self.bias, gate=gate)

    def project_normed(
        self, norm: RMSNorm | None, x: torch.Tensor, residual: torch.Tensor | None, *, gate: Gate | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the projection of the normalized x + residual, and x + residual."""
        if norm is None:
            total = x if residual is None else x + residual
            return self(total, gate=gate), total
        return self.ops.project_normed(x, residual, norm.value, self.value, self.bias, gate=gate)

    def project_onto(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the projection of x, normalized by a norm `after`, and the residual still to be added, if any."""
        if after is not None:
            return after(self(x)), residual
        return self.ops.project_onto(x, residual, self.value, self.bias)


class FusedLinear(Linear):
    """Projections of the same input, computed as one: `parts` maps each one's name in checkpoints to its held rows.

    A checkpoint may also store them fused, under this module's own name (see `FusedNames`).
    """

    def __init__(
        self, inputs: int, parts: dict[str, Cut], *, bias: bool, dtype: torch.dtype, quantized: bool = False
    ) -> None:
        super().__init__(inputs, [part.held for part in parts.values()], bias=bias, dtype=dtype, quantized=quantized)
        self.parts = parts


class RowParallelLinear(Linear):
    """A linear layer whose inputs are split over ranks: outputs are summed, and rank 0 alone adds the bias."""

    def __init__(
        self, inputs: Cut, outputs: int, shard: Shard, *, bias: bool, dtype: torch.dtype, quantized: bool = False
    ) -> None:
        super().__init__(inputs.held, outputs, bias=bias, dtype=dtype, quantized=quantized)
        self.cuts = {"weight": inputs.along(1)}
        self._shard = shard

    def process_weights_after_loading(self) -> None:
        """Zero the bias except on rank 0."""
        super().process_weights_after_loading()
        if self.bias is not None and self._shard.rank:
            self.bias.data.zero_()

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's summand: [tokens, inputs] -> [tokens, outputs]."""
        return self.ops.project(x, self.value, self.bias)

    def forward(self, x: torch.Tensor, *, gate: Gate | None = None) -> torch.Tensor:
        """Return the sum over ranks. Raise ValueError for a gate, which would have to be applied to the sum."""
        if gate is not None:
            raise ValueError("what is summed over processes goes through no gate")
        return self._shard.collectives.all_reduce(self.partial(x))

    def project_onto(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Linear.project_onto`. With several ranks, the residual is not added before the sum."""
        if after is None and self._shard.size > 1:
            return self(x), residual
        return super().project_onto(x, residual, after)


def nothing() -> None:
    """Do nothing: the callback of all runs but the last of a weight that is taken in several runs."""
