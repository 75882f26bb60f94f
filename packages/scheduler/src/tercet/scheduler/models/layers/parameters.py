"""Uninitialized parameters, into which weights are loaded."""

import torch
from torch import nn


def empty_parameter(*shape: int, dtype: torch.dtype, device: str | None = None) -> nn.Parameter:
    """Return an uninitialized parameter."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def rounded(factor: float, dtype: torch.dtype) -> float:
    """Round a factor to the dtype of a model, as transformers does for the scale of embeddings."""
    return float(torch.tensor(factor, dtype=dtype, device="cpu"))
