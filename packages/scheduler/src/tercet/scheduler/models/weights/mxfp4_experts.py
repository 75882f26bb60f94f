"""The conversion of gpt-oss's MXFP4 experts to our layout (`QuantizedWeight`).

A projection of all experts with n outputs and k inputs has two tensors: blocks uint8 [experts, n, k / 32, 16], whose
byte j has column 2 * j of its 32 in the lower half and the next one in the upper, and scales uint8 [experts, n, k / 32]
in e8m0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from tercet.kernels.ops.moe import QuantizedExperts
from tercet.kernels.ops.quantized import MXFP4_BLOCK, QuantizedWeight, dequantize, pack_int4
from tercet.scheduler.model_files import ModelError, StoredTensor
from tercet.scheduler.models.layers.moe import ExpertLinear
from tercet.scheduler.models.layers.shard import Cut
from tercet.scheduler.models.weights.checkpoint_names import deinterleaved

Read = Callable[[str], torch.Tensor]
"""A function that reads the stored tensor of a name, on the model's device."""


class ReadPart(Protocol):
    """The same for a part of a tensor."""

    def __call__(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """Return the stored tensor, or its part."""
        ...


@dataclass(frozen=True, eq=False)
class Mxfp4Experts:
    """A projection of all experts of a layer, and its name in the checkpoint. It has the methods of
    `QuantizedLinear`.
    """

    target: ExpertLinear
    name: str
    rows: Cut
    """The part of each expert's stored outputs that this rank holds."""
    columns: Cut
    """The part of each expert's stored inputs that this rank holds, a single range."""
    experts: Cut
    """The experts that this rank holds."""
    interleaved: bool
    """Gates and ups are stored interleaved."""

    def __post_init__(self) -> None:
        if self.columns.whole % MXFP4_BLOCK[1]:
            raise ModelError(f"{self.name}: {self.columns.whole} inputs are no blocks of {MXFP4_BLOCK[1]}")
        if self.columns.held % MXFP4_BLOCK[1]:
            raise ValueError(f"{self.name}: {self.columns.held} inputs to a process are no blocks of {MXFP4_BLOCK[1]}")

    @property
    def parts(self) -> dict[str, Cut]:
        """The single part."""
        return {self.name: self.rows}

    def shapes(self, stored: Mapping[str, StoredTensor]) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        """Return the shapes of the two stored tensors."""
        scales = self.experts.whole, self.rows.whole, self.columns.whole // MXFP4_BLOCK[1]
        return {f"{self.name}_blocks": (*scales, MXFP4_BLOCK[1] // 2), f"{self.name}_scales": scales}

    def extras(self) -> list[str]:
        """Return no names: no other tensors may be stored."""
        return []

    def missing_biases(self) -> list[str]:
        """Return no names: stored biases are always expected."""
        return []

    def load(self, read: ReadPart, device: torch.device, dtype: torch.dtype | None) -> None:
        """Set the layer's weight: quantized, or in full if `dtype` is given. Only one expert is in memory twice."""
        blocks, scales = (self._held(read(f"{self.name}_{kind}", self.experts)) for kind in ("blocks", "scales"))
        experts, outputs, inputs = self.target.weight.shape
        if dtype is not None:
            memory = torch.empty(experts, outputs, inputs, dtype=dtype, device=device)
            for expert in range(experts):
                memory[expert] = dequantize(self._weight(blocks[expert], scales[expert]), dtype)
            self.target.weight = nn.Parameter(memory, requires_grad=False)
            return
        rows = QuantizedWeight(
            format="mxfp4",
            codes=torch.empty(experts * outputs, inputs // 2, dtype=torch.uint8, device=device),
            scales=torch.empty(experts * outputs, scales.shape[2], dtype=torch.uint8, device=device),
            zeros=None,
            block=MXFP4_BLOCK,
        )
        whole = QuantizedExperts(rows, experts)
        for expert in range(experts):
            weight = self._weight(blocks[expert], scales[expert])
            whole[expert].codes.copy_(weight.codes)
            whole[expert].scales.copy_(weight.scales)
        self.target.quantized = whole

    def _held(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the held part of a tensor of outputs and input blocks: [experts, rows, blocks, ...]."""
        size = MXFP4_BLOCK[1]
        blocks = tuple(range(run.start // size, run.stop // size) for run in self.columns.runs)
        return Cut(self.columns.whole // size, blocks, 2).of(self.rows.along(1).of(stored))

    def _weight(self, blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
        """Convert the weight of one expert."""
        if self.interleaved:
            blocks, scales = deinterleaved(blocks), deinterleaved(scales)
        codes = torch.stack([blocks & 15, blocks >> 4], -1).view(len(blocks), -1)
        return QuantizedWeight(format="mxfp4", codes=pack_int4(codes), scales=scales, zeros=None, block=MXFP4_BLOCK)
