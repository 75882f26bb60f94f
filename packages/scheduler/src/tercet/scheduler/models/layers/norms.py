"""Root mean square normalization."""

import torch

from tercet.kernels.ops.projection import Norm
from tercet.scheduler.models.layers.layer_ops import OpsModule
from tercet.scheduler.models.layers.parameters import empty_parameter


class RMSNorm(OpsModule):
    """Root mean square normalization."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    @property
    def value(self) -> Norm:
        """The weight and epsilon as an argument of operations."""
        return Norm(self.weight, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        return self.ops.rmsnorm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalized x + residual, and x + residual; without a residual, that of x."""
        if residual is None:
            return self(x), x
        return self.ops.add_rmsnorm(x, residual, self.weight, self.eps)


class FloatNorm(RMSNorm):
    """An RMSNorm whose weight is kept in float32, so that products are rounded once."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:  # noqa: ARG002
        super().__init__(size, eps, torch.float32)


class CenteredNorm(FloatNorm):
    """A norm whose checkpoints store weight - 1."""

    def process_weights_after_loading(self) -> None:
        """Add 1 to the stored weight."""
        self.weight.data += 1


class WeightlessNorm(RMSNorm):
    """An RMSNorm without a stored weight: all factors are 1."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(size, eps, dtype)
        del self.weight
        self.register_buffer("weight", torch.ones(size, dtype=dtype), persistent=False)
