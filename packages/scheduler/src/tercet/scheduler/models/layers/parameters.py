"""Parameters as they are before weights are loaded."""

import torch
from torch import nn


def empty_parameter(*shape: int, dtype: torch.dtype, device: str | None = None) -> nn.Parameter:
    """Uninitialised: weights are loaded into it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
