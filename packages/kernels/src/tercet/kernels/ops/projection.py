"""The linear layers of a model, with what stands around them: a norm before, a gate or a sum after."""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.quantized import QuantizedWeight, linear_quantized
from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm

Weight = torch.Tensor | QuantizedWeight
"""[outputs, inputs]"""


class Norm(NamedTuple):
    """An RMS norm: see `rmsnorm`."""

    weight: torch.Tensor  # [size]
    eps: float


def normed_sum(x: torch.Tensor, residual: torch.Tensor | None, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """(rmsnorm(x + residual), x + residual); without a residual, (rmsnorm(x), x)."""
    return (rmsnorm(x, *norm), x) if residual is None else add_rmsnorm(x, residual, *norm)


def project(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, gate: Gate | None = None
) -> torch.Tensor:
    """The product x @ weight.T + bias: [tokens, inputs] -> [tokens, outputs].

    With a `gate`, a weight holds gates and then as many ups, and `act_and_mul` of these [tokens, outputs / 2] is given.
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
    """(`project` of the normalised x + residual, x + residual); without a residual, x is all there is."""
    normed, total = normed_sum(x, residual, norm)
    return project(normed, weight, bias, gate=gate), total


def project_onto(
    x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(`project`, the residual to be added to it); a faster version may have added it, and gives None for it."""
    return project(x, weight, bias), residual
