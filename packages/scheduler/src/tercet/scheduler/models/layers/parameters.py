"""Uninitialized parameters, into which weights are loaded."""

import torch
from torch import nn


def empty_parameter(*shape: int, dtype: torch.dtype, device: str | None = None) -> nn.Parameter:
    """Return an uninitialized parameter."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
