"""Layers of encoders, in addition to those of `layers`."""

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
"""Activations by their names in config.json."""


def activation(name: str) -> Activation:
    """Return the activation of a name. Raise ModelError for an unsupported one."""
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: activation {name!r} is not supported, only {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class LayerNorm(nn.Module):
    """Layer normalization; some families have no bias."""

    def __init__(self, size: int, eps: float, *, bias: bool = True, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False) if bias else None
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self._eps)


class Table(nn.Module):
    """An embedding table of tokens, positions or types."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype), requires_grad=False)

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return vectors [tokens, size] of numbers [tokens]."""
        return F.embedding(numbers, self.weight)
