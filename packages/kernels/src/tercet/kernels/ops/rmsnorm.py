"""RMS normalization in float32, rounded before a weight of x's dtype, as in Hugging Face's Llama and Qwen.

With a float32 weight only the result is rounded, as in Gemma.
"""

import torch


def rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return weight * x / sqrt(mean(x²) + eps) over the last dimension, in x's dtype."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rmsnorm(x + residual), x + residual), with the sum rounded to x's dtype. `residual` is not changed."""
    total = residual + x
    return rmsnorm(total, weight, eps), total
