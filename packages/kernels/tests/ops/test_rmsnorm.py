import math

import pytest
import torch

from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm


@pytest.mark.parametrize("shape", [(1, 8), (5, 7), (3, 2, 6)])
def test_equals_the_formula(shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape) * 30, torch.randn(shape[-1])
    for row, normed in zip(x.flatten(0, -2), rmsnorm(x, weight, 1e-5).flatten(0, -2), strict=True):
        root = math.sqrt(sum(value * value for value in row.tolist()) / shape[-1] + 1e-5)
        expected = [w * value / root for w, value in zip(weight.tolist(), row.tolist(), strict=True)]
        torch.testing.assert_close(normed, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_half_precision_is_squared_in_float32() -> None:
    x = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square is beyond float16
    assert rmsnorm(x, torch.ones(4, dtype=torch.float16), 0.0).tolist() == [[1.0] * 4]


def test_inputs_of_a_float32_weight_are_not_rounded_first() -> None:
    x, weight = torch.randn(40, 16).bfloat16(), torch.randn(16)
    expected = rmsnorm(x.float(), weight, 1e-6).bfloat16()
    assert torch.equal(rmsnorm(x, weight, 1e-6), expected)
    assert not torch.equal(rmsnorm(x, weight.bfloat16(), 1e-6), expected)


def test_the_residual_form_is_the_sum_then_the_norm() -> None:
    x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    before = residual.clone()
    normed, total = add_rmsnorm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rmsnorm(total, weight, 1e-6))
    assert torch.equal(residual, before)
