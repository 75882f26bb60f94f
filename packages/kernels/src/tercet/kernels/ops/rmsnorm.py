"""RMS normalisation: float32 inside, rounded before a weight of x's dtype, as Hugging Face's Llama and Qwen do it.

Before a weight in float32 nothing is rounded, only the result, as Gemma does it.
"""

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Weight * x / sqrt(mean(x²) + eps) over the last dimension. Returns x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual), the sum in x's dtype as in a model without fusion. `residual` is kept."""
    total = residual + x
    return rmsnorm(total, weight, eps), total
