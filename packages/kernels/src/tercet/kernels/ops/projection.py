"""Linear layers of a model with adjacent operations: a norm before, an activation or a sum after."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.quantized import QuantizedWeight, linear_quantized
from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm

Weight = torch.Tensor | QuantizedWeight
"""[outputs, inputs]"""


class Norm(NamedTuple):
    """Weight and epsilon of an RMS norm: see `rmsnorm`."""

    weight: torch.Tensor  # [size]
    eps: float


def normed_sum(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rmsnorm(x + residual), x + residual); without a residual, (rmsnorm(x), x)."""
    return (rmsnorm(x, *norm), x) if residual is None else add_rmsnorm(x, residual, *norm)


def project(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, gate: Gate | None = None
) -> torch.Tensor:
    """Return x @ weight.T + bias: [tokens, inputs] -> [tokens, outputs].

    With a `gate`, the weight holds gate rows and then as many up rows, and the result is their `act_and_mul` [tokens,
    outputs / 2].
    """
    out = linear_quantized(x, weight, bias) if isinstance(weight, QuantizedWeight) else F.linear(x, weight, bias)
    return out if gate is None else act_and_mul(out, gate)


def project_normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    gate: Gate | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (`project` of the normalized x + residual, x + residual); without a residual, of x alone."""
    normed, total = normed_sum(x, residual, norm)
    return project(normed, weight, bias, gate=gate), total


def project_onto(
    x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (`project`, residual); a faster version may return (the sum, None)."""
    return project(x, weight, bias), residual
