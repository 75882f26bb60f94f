"""Weights in 4 bits as the left operand, against the reference."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import quantized as reference
from tercet.kernels.triton.linear import turned
from tercet.kernels.triton.linear.turned import supports_turned, turned_linear


@pytest.mark.parametrize("block", [(1, 32), (1, 128), (1, 1 << 30)])
@pytest.mark.parametrize(("rows", "n", "k"), [(2, 50, 288), (20, 130, 256), (70, 50, 288), (150, 24, 288)])
def test_linear(block: tuple[int, int], rows: int, n: int, k: int, device: torch.device) -> None:
    weight = reference.quantize(torch.randn(n, k, device=device) * torch.rand(n, 1, device=device), "int4", block)
    assert weight.zeros is not None
    weight = replace(weight, zeros=torch.randint(0, 16, weight.zeros.shape, device=device).float())
    x, bias = torch.randn(2, rows, k, device=device)[1], torch.randn(n, device=device)
    for given in (None, bias):
        actual, expected = turned_linear(x, weight, given), reference.linear_quantized(x, weight, given)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_inputs_in_splits_with_a_bias(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = list[int]()

    def counted(programs: int, rows: int, k: int, wanted: int) -> int:
        splits.append(4)
        return 4

    monkeypatch.setattr(turned, "splits_for", counted)
    weight = reference.quantize(torch.randn(40, 416, device=device), "int4", (1, 32))
    x, bias = torch.randn(3, 5, 416, device=device).half(), torch.randn(40, device=device).half()
    actual, expected = turned_linear(x, weight, bias), reference.linear_quantized(x, weight, bias)
    assert splits == [4]
    torch.testing.assert_close(actual, expected, rtol=4e-3, atol=2e-2)


def test_other_weights_are_not_turned() -> None:
    full = torch.randn(32, 64)
    weight = reference.quantize(full, "int4", (1, 32))
    assert supports_turned(weight)
    assert not supports_turned(replace(weight, zeros=None))
    assert not supports_turned(reference.quantize(full, "int4", (8, 32)))
    assert not supports_turned(reference.quantize(full, "fp8", (1, 64)))
