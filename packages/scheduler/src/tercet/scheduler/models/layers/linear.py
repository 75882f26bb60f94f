"""Matrices, and the linear layers over them: whole, or what one process of several holds of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.projection import Weight
from tercet.kernels.ops.quantized import QuantizedWeight
from tercet.scheduler.models.layers.layer_ops import OpsModule
from tercet.scheduler.models.layers.norms import RMSNorm
from tercet.scheduler.models.layers.parameters import empty_parameter
from tercet.scheduler.models.layers.shard import Cut, Shard


class Lent(NamedTuple):
    """Rows of a weight that are somewhere else, such as in a file that is mapped into memory."""

    rows: torch.Tensor
    taken: Callable[[], None]
    """Called once the rows are read."""


class Matrix(OpsModule):
    """A module with a weight [outputs, inputs], made of one or more runs of rows.

    Whoever lays weights out in a way of its own takes them away from the module. Until then they may lie where they
    were found, so that nothing is copied that is not kept.
    """

    def __init__(self, inputs: int, runs: Sequence[int], dtype: torch.dtype, device: str | None = None) -> None:
        super().__init__()
        self.weight = empty_parameter(sum(runs), inputs, dtype=dtype, device=device)
        self._runs = list(runs)
        self._lent: dict[int, Lent] = {}

    def lend(self, run: int | None, lent: Lent) -> None:
        """Leave a run of rows where it is, in whatever dtype, until the weight is taken; None: all runs, as one."""
        if run is not None:
            self._lent[run] = lent
            return
        for index, rows in enumerate(torch.split(lent.rows, self._runs)):
            last = index == len(self._runs) - 1
            self._lent[index] = Lent(rows, lent.taken if last else nothing)

    def take(self) -> list[torch.Tensor]:
        """The runs of rows in the weight's dtype, of which the module keeps nothing."""
        runs = list(torch.split(self.weight.data, self._runs))
        for index, lent in self._lent.items():
            runs[index] = lent.rows.to(self.weight.dtype)
            lent.taken()
        self._lent.clear()
        self.weight.data = torch.empty(0)
        return runs


class Linear(Matrix):
    """x @ weight.T + bias. Of a quantised model the weight is on no device until it is loaded, in either form."""

    packable = True
    """Whether it is nothing but that, so that kernels with weights in a layout of their own may take its place."""

    def __init__(
        self, inputs: int, outputs: int | Sequence[int], *, bias: bool, dtype: torch.dtype, quantised: bool = False
    ) -> None:
        runs = [outputs] if isinstance(outputs, int) else outputs
        super().__init__(inputs, runs, dtype, "meta" if quantised else None)
        self.bias = empty_parameter(sum(runs), dtype=dtype) if bias else None
        self.quantised: QuantizedWeight | None = None
        self.order: torch.Tensor | None = None
        """Which row of a checkpoint each row is, int64 [outputs], where it is not the same one."""

    def process_weights_after_loading(self) -> None:
        """Follow `order`. Rows that were lent follow it when they are taken."""
        if self.order is None:
            return
        if self.quantised is not None:
            self.quantised = self.quantised.rows(self.order)
        elif not self._lent:
            self.weight.data = self.weight.data[self.order]
        if self.bias is not None:
            self.bias.data = self.bias.data[self.order]

    def take(self) -> list[torch.Tensor]:
        """See `Matrix.take`."""
        lent, runs = bool(self._lent), super().take()
        if self.order is None or not lent:
            return runs
        return list(torch.split(torch.cat(runs)[self.order], self._runs))

    @property
    def value(self) -> Weight:
        """What is computed with."""
        return self.weight if self.quantised is None else self.quantised

    def forward(self, x: torch.Tensor, *, gate: Gate | None = None) -> torch.Tensor:
        """[tokens, inputs] -> [tokens, outputs]: see `tercet.kernels.ops.projection` for this and what follows."""
        return self.ops.project(x, self.value, self.bias, gate=gate)

    def of_normed(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, *, gate: Gate | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what it gives of the normalised x + residual, x + residual)."""
        return self.ops.project_normed(x, residual, norm.value, self.value, self.bias, gate=gate)

    def onto(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(what it gives of x, normalised if there is a norm `after` it; what is yet to be added to that)."""
        if after is not None:
            return after(self(x)), residual
        return self.ops.project_onto(x, residual, self.value, self.bias)


class FusedLinear(Linear):
    """Projections of one input, computed as one: `parts` maps each one's name in checkpoints to what is held of it.

    A checkpoint may also hold them as they are here, under this module's own name (see `FusedNames`).
    """

    def __init__(
        self, inputs: int, parts: dict[str, Cut], *, bias: bool, dtype: torch.dtype, quantised: bool = False
    ) -> None:
        super().__init__(inputs, [part.held for part in parts.values()], bias=bias, dtype=dtype, quantised=quantised)
        self.parts = parts


class RowParallelLinear(Linear):
    """One of whose inputs each process has some: what they give is summed, the bias being that of rank 0 alone."""

    def __init__(
        self, inputs: Cut, outputs: int, shard: Shard, *, bias: bool, dtype: torch.dtype, quantised: bool = False
    ) -> None:
        super().__init__(inputs.held, outputs, bias=bias, dtype=dtype, quantised=quantised)
        self.cuts = {"weight": inputs.along(1)}
        self._shard = shard

    def process_weights_after_loading(self) -> None:
        """Add the bias once."""
        super().process_weights_after_loading()
        if self.bias is not None and self._shard.rank:
            self.bias.data.zero_()

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """What this process adds to the sum: [tokens, inputs] -> [tokens, outputs]."""
        return self.ops.project(x, self.value, self.bias)

    def forward(self, x: torch.Tensor, *, gate: Gate | None = None) -> torch.Tensor:
        """The sum. Raises ValueError for a gate, which the sum would have to go through."""
        if gate is not None:
            raise ValueError("what is summed over processes goes through no gate")
        return self._shard.collectives.all_reduce(self.partial(x))

    def onto(
        self, x: torch.Tensor, residual: torch.Tensor, after: RMSNorm | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Linear.onto`. Over several processes nothing is added before the sum."""
        if after is None and self._shard.size > 1:
            return self(x), residual
        return super().onto(x, residual, after)


def nothing() -> None:
    """Of a weight that is taken in several runs, for all but the last."""
