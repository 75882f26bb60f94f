"""Linear layers over weights in several number formats: the reference of the native kernels."""

import torch

INT4_BLOCK = 32
"""Number of inputs that share a scale."""


def quantize_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to int8 [n, k] with scales float32 [n]: the largest weight of each output becomes 127 or -127."""
    wide = weight.float()
    scales = wide.abs().amax(-1) / 127
    steps = wide / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    return steps.round().to(torch.int8), scales


def quantize_int4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to 4 bits: codes uint8 [n, blocks * 32] and scales bfloat16 [n, blocks].

    A weight is (code - 8) * scale, with codes 0 to 15. The largest of each block of 32 inputs becomes about -8, because
    there is no +8. Inputs past k are zero (code 8).
    """
    outputs, inputs = weight.shape
    blocks = torch.nn.functional.pad(weight.float(), (0, -inputs % INT4_BLOCK)).view(outputs, -1, INT4_BLOCK)
    extreme = blocks.gather(2, blocks.abs().argmax(2, keepdim=True))
    scales = (extreme / -8).bfloat16()
    divisors = scales.float().masked_fill_(scales == 0, 1.0)
    steps = (blocks / divisors).round_().clamp_(-8, 7).add_(8)
    return steps.to(torch.uint8).flatten(1), scales[:, :, 0]


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return X [m, k] @ weight [n, k].T + bias, float32 [m, n]; inputs are rounded to the weight's dtype first."""
    out = x.to(weight.dtype).float() @ weight.float().T
    return out if bias is None else out + bias.float()


def linear_int8(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `linear` for weights of `quantize_weight`; each row of inputs is rounded to int8 with its own scale."""
    steps, step = quantize_weight(x)
    products = (steps.double() @ weight.double().T).float()  # integers, exact in float64
    out = products * scales * step[:, None]
    return out if bias is None else out + bias.float()


def linear_int4(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `linear` for weights of `quantize_int4`; inputs are rounded as in `linear_int8`."""
    steps, step = quantize_weight(x)
    meant = (weight.double() - 8).view(*scales.shape, INT4_BLOCK) * scales.double()[:, :, None]
    out: torch.Tensor = (steps.double() @ meant.flatten(1)[:, : x.shape[1]].T).float() * step[:, None]
    return out if bias is None else out + bias.float()
