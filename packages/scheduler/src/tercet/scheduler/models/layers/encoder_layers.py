"""What the layers of encoders are made of, besides those of `layers`."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tercet.scheduler.model_files import ModelError

Activation = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""As config.json names them."""


def activation(name: str) -> Activation:
    """Raises ModelError for one that is not here."""
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: activation {name!r} is not supported, only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class LayerNorm(nn.Module):
    """Layer normalisation; some families have no bias there."""

    def __init__(self, size: int, eps: float, *, bias: bool = True, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if bias else None
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)


class Table(nn.Module):
    """A vector for each number of something: tokens, positions, types."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype), requires_grad=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, size]."""
        return F.embedding(numbers, self.weight)
