"""Activations in 8 bits, and products of them."""

from dataclasses import replace

import pytest
import torch

from tercet.kernels.ops.quantized import EightBits, dequantize, quantize, with_tall_blocks
from tercet.kernels.ops.rounded import LARGEST, in_full, linear_rounded, round_rows

KINDS: list[EightBits] = ["fp8", "int8"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [64, 16])
def test_rows_are_rounded_by_their_largest_elements(kind: EightBits, width: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64) * torch.tensor([1.0, 1e-3, 1e4, 0.0, 7.0])[:, None]
    rounded = round_rows(x, kind, width)
    assert rounded.codes.shape == x.shape
    assert rounded.scales.shape == (5, 64 // width)
    largest = x.abs().view(5, -1, width).amax(2)
    codes = rounded.codes.float().abs().view(5, -1, width).amax(2)
    assert set(codes[largest > 0].tolist()) == {LARGEST[kind]}
    step = largest / (16 if kind == "fp8" else 127 * 2)
    far = (in_full(rounded) - x).abs().view(5, -1, width)
    assert (far <= step[..., None] * 1.001).all()
    assert torch.equal(in_full(rounded)[3], torch.zeros(64))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_stays_so_and_alone(kind: EightBits, bad: float) -> None:
    x = torch.ones(3, 32)
    x[1, 7] = bad
    whole = in_full(round_rows(x, kind, 32))
    assert whole[1].isnan().all()
    assert torch.equal(whole[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_rounded_values(kind: EightBits) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(9, 64), quantize(torch.randn(24, 64), kind, (1, 64)), torch.randn(24)
    rounded = round_rows(x, kind, 64)
    actual = linear_rounded(rounded, weight, bias, torch.float32)
    expected = in_full(rounded).double() @ dequantize(weight).double().T + bias
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-4)
    full = x @ dequantize(weight).T + bias
    assert ((actual - full).square().mean() / full.square().mean()).sqrt() < 0.05


def test_equal_scales_of_adjacent_rows_become_one() -> None:
    weight = quantize(torch.randn(32, 64), "fp8", (1, 32))
    assert with_tall_blocks(weight, 8) is weight
    equal = replace(weight, scales=weight.scales[::8].repeat_interleave(8, 0))
    tall = with_tall_blocks(equal, 8)
    assert (tall.block, tall.scales.shape) == ((8, 32), (4, 2))
    assert torch.equal(dequantize(tall), dequantize(equal))
    assert with_tall_blocks(equal, 24) is equal
    assert with_tall_blocks(replace(equal, zeros=equal.scales), 8).block == (1, 32)
