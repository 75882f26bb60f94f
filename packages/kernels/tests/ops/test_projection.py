"""The definition of a model's linear layers, against the formulas."""

import pytest
import torch

from tercet.kernels.ops.projection import Norm, Weight, project, project_normed, project_onto
from tercet.kernels.ops.quantized import dequantize, quantize

X, RESIDUAL, FULL, BIAS, SCALES = (torch.randn(shape) for shape in [(3, 64), (3, 64), (10, 64), (10,), (64,)])


@pytest.fixture(params=["full", "int8"])
def weights(request: pytest.FixtureRequest) -> tuple[Weight, torch.Tensor]:
    """A weight, and the numbers that it stands for."""
    if request.param == "full":
        return FULL, FULL
    rounded = quantize(FULL, "int8", (1, 32))
    return rounded, dequantize(rounded)


def test_a_product_and_its_gate(weights: tuple[Weight, torch.Tensor]) -> None:
    weight, numbers = weights
    product = X @ numbers.T + BIAS
    gate, up = product[:, :5], product[:, 5:]
    torch.testing.assert_close(project(X, weight, BIAS), product)
    torch.testing.assert_close(project(X, weight, BIAS, gate="silu"), gate * torch.sigmoid(gate) * up)


@pytest.mark.parametrize("residual", [None, RESIDUAL])
def test_of_a_norm(weights: tuple[Weight, torch.Tensor], residual: torch.Tensor | None) -> None:
    weight, numbers = weights
    total = X if residual is None else X + residual
    normed = total / (total.square().mean(1, keepdim=True) + 0.1).sqrt() * SCALES
    out, kept = project_normed(X, residual, Norm(SCALES, 0.1), weight)
    torch.testing.assert_close(out, normed @ numbers.T)
    torch.testing.assert_close(kept, total)


def test_onto_a_residual(weights: tuple[Weight, torch.Tensor]) -> None:
    weight, numbers = weights
    out, left = project_onto(X, RESIDUAL[:, :10], weight, BIAS)
    assert left is not None
    torch.testing.assert_close(out + left, X @ numbers.T + BIAS + RESIDUAL[:, :10])
