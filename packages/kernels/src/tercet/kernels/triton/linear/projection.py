"""Linear layers of a model: dispatch between fused GEMV kernels, quantized kernels and torch.

One row uses a kernel that fuses everything; more rows use torch's library, or tensor-core kernels that unpack quantized
weights, with separate kernels for norm and activation. Before quantized weights, a norm stays a separate kernel,
because their programs are busy enough; it also rounds activations where a product takes them in 8 bits. The references
are those of `tercet.kernels.ops.projection`.
"""

import torch
import torch.nn.functional as F  # noqa: N812

from tercet.kernels.ops.activation import Gate
from tercet.kernels.ops.lora import LoRARows, LoRAWeights
from tercet.kernels.ops.projection import Norm, Weight
from tercet.kernels.ops.quantized import QuantizedWeight
from tercet.kernels.triton.activation import act_and_mul
from tercet.kernels.triton.linear import linear, quantized_gemv
from tercet.kernels.triton.linear.adapted_row import adapted_row, supports_adapted_row
from tercet.kernels.triton.linear.choices import Way, rounds, way_of
from tercet.kernels.triton.linear.eight_bits import linear_rounded, rounding_of
from tercet.kernels.triton.linear.quantized import linear_quantized
from tercet.kernels.triton.linear.rounding import round_normed
from tercet.kernels.triton.rmsnorm import add_rmsnorm, rmsnorm


def project(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, gate: Gate | None = None
) -> torch.Tensor:
    """See `tercet.kernels.ops.projection.project`."""
    if _is_row(x, weight):
        return _row_linear(x, weight, bias, gate=gate)
    many = linear_quantized(x, weight, bias) if isinstance(weight, QuantizedWeight) else F.linear(x, weight, bias)
    return many if gate is None else act_and_mul(many, gate)


def project_normed(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    gate: Gate | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `tercet.kernels.ops.projection.project_normed`."""
    if residual is None and not isinstance(weight, QuantizedWeight) and linear.supports_gemv(x, weight):
        return linear.gemv(x, weight, bias, norm=norm, gate=gate), x
    if isinstance(weight, QuantizedWeight) and rounds(way := _way(x, weight)):
        rounded, total = round_normed(x, residual, norm, *rounding_of(weight, way))
        out = linear_rounded(rounded, weight, bias, way, x.dtype)
        return out if gate is None else act_and_mul(out, gate), total
    normed, total = (rmsnorm(x, *norm), x) if residual is None else add_rmsnorm(x, residual, *norm)
    return project(normed, weight, bias, gate=gate), total


def project_onto(
    x: torch.Tensor, residual: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Project x and add the residual; for one row it is part of the result already."""
    if _is_row(x, weight):
        return _row_linear(x, weight, bias, residual=residual), None
    return project(x, weight, bias), residual


def project_adapted(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    adapters: LoRAWeights,
    rows: LoRARows,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return `project` of the normalized x, plus `add_lora` and the residual; None except for one row in full."""
    if isinstance(weight, QuantizedWeight) or not supports_adapted_row(x, weight, adapters, rows):
        return None
    return adapted_row(x, weight, bias, adapters, rows, norm=norm, residual=residual)


def _way(x: torch.Tensor, weight: QuantizedWeight) -> Way:
    """Return the way of a product; that of one row, and of other than two dimensions, widens weights."""
    return "weights" if x.ndim != 2 or quantized_gemv.supports_gemv(x, weight) else way_of(x, weight)


def _is_row(x: torch.Tensor, weight: Weight) -> bool:
    return (
        quantized_gemv.supports_gemv(x, weight)
        if isinstance(weight, QuantizedWeight)
        else linear.supports_gemv(x, weight)
    )


def _row_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    gate: Gate | None = None,
) -> torch.Tensor:
    if isinstance(weight, QuantizedWeight):
        return quantized_gemv.gemv(x, weight, bias, residual=residual, gate=gate)
    return linear.gemv(x, weight, bias, residual=residual, gate=gate)
