"""Root mean square normalisation."""

import torch

from tercet.kernels.ops.projection import Norm
from tercet.scheduler.models.layers.layer_ops import OpsModule
from tercet.scheduler.models.layers.parameters import empty_parameter


class RMSNorm(OpsModule):
    """Root mean square normalisation."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    @property
    def value(self) -> Norm:
        """What is computed with."""
        return Norm(self.weight, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return self.ops.rmsnorm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised x + residual, x + residual); without a residual, x is all there is."""
        if residual is None:
            return self(x), x
        return self.ops.add_rmsnorm(x, residual, self.weight, self.eps)


class CenteredNorm(RMSNorm):
    """One of which checkpoints hold how far its weight is from 1. That sum is kept in float32, so that it is exact."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:  # noqa: ARG002 - the model's
        super().__init__(size, eps, torch.float32)

    def process_weights_after_loading(self) -> None:
        """Make the weight of what a checkpoint holds."""
        self.weight.data += 1
