"""Linear layers over weights in a number format: what the native ones must equal."""

import torch


def quantise_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [n, k], scales float32 [n]): each output's largest weight becomes 127 or -127."""
    wide = weight.float()
    scales = wide.abs().amax(-1) / 127
    steps = wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return steps.round().to(torch.int8), scales


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """X [m, k] @ weight [n, k].T + bias, float32 [m, n]; inputs are rounded to the weight's dtype first."""
    out = x.to(weight.dtype).float() @ weight.float().T
    return out if bias is None else out + bias.float()


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """As `linear`, for weights of `quantise_weight`: each row of inputs is rounded to int8 with a scale of its own."""
    steps, step = quantise_weight(x)
    products = (steps.double() @ weight.double().T).float()  # whole numbers, exact in float64
    out = products * scales * step[:, None]
    return out if bias is None else out + bias.float()
