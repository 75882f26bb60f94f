"""RMS normalisation, as Hugging Face's Llama and Qwen do it: float32 inside, rounded before the weight."""

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Weight * x / sqrt(mean(x²) + eps) over the last dimension. Returns x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual), the sum in x's dtype as in a model without fusion. `residual` is kept."""
    total = residual + x
    return rmsnorm(total, weight, eps), total
