"""Packed linear layers against plain torch ones: every format, odd sizes, few rows and many."""

import pytest
import torch

from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import pack_linear
from tercet.kernels.ops.linear import linear, linear_int8, quantise_weight

SIZES = [(1, 1), (16, 32), (7, 100), (50, 64), (160, 576), (33, 1000)]
ROWS = [1, 2, 3, 4, 5, 8, 13, 16, 31, 32, 33, 70]


def relative_error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual - exact).abs().max() / exact.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_equals_torch(library: Library, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed, plain = pack_linear(library, weight, bias), pack_linear(library, weight)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        assert relative_error(packed(x), linear(x, weight, bias)) < 1e-5
        assert relative_error(plain(x), linear(x, weight)) < 1e-5


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_int8_equals_torch(library: Library, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)
    packed = pack_linear(library, weight, bias, int8=True)
    for rows in ROWS:
        x = torch.randn(rows, inputs) * torch.randn(rows, 1).exp()
        assert relative_error(packed(x), linear_int8(x, *quantise_weight(weight), bias)) < 1e-5


def test_int8_is_near_what_it_rounds(library: Library) -> None:
    weight, x = torch.randn(200, 800), torch.randn(9, 800)
    packed = pack_linear(library, weight, int8=True)
    error = (packed(x) - linear(x, weight)).square().mean() / linear(x, weight).square().mean()
    assert error.sqrt() < 0.02
    assert packed.bytes < 0.3 * weight.nbytes


def test_int8_of_zeros_is_zero(library: Library) -> None:
    packed = pack_linear(library, torch.zeros(20, 40), int8=True)
    assert torch.equal(packed(torch.randn(3, 40)), torch.zeros(3, 20))
    assert torch.equal(pack_linear(library, torch.randn(20, 40), int8=True)(torch.zeros(2, 40)), torch.zeros(2, 20))


def test_a_float32_row_has_the_same_bits_beside_any_others(library: Library) -> None:
    x, packed = torch.randn(70, 300), pack_linear(library, torch.randn(150, 300))
    whole = packed(x)
    for rows in (1, 2, 3, 4, 7, 30):
        assert torch.equal(packed(x[-rows:]), whole[-rows:])


def test_a_nan_stays_in_its_row(library: Library) -> None:
    for dtype, int8, bad in (
        (torch.float32, 0, torch.nan),
        (torch.bfloat16, 0, torch.nan),
        (torch.float32, 1, torch.inf),
    ):
        packed, x = pack_linear(library, torch.randn(40, 64).to(dtype), int8=bool(int8)), torch.randn(20, 64)
        healthy = packed(x)
        x[3, 5] = bad
        out = packed(x)
        assert out[3].isnan().all()
        others = [row for row in range(20) if row != 3]
        assert torch.equal(out[others], healthy[others])


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_come_back_as_they_went_in(library: Library, dtype: torch.dtype, int8: bool) -> None:
    weight = torch.randn(50, 37).to(dtype)
    packed, index = pack_linear(library, weight, int8=int8), torch.tensor([49, 0, 17, 17])
    steps, scales = quantise_weight(weight)
    expected = steps.float() * scales[:, None] if int8 else weight.float()
    torch.testing.assert_close(packed.rows(index), expected[index], rtol=1e-6, atol=0)
    with pytest.raises(IndexError):
        packed.rows(torch.tensor([50]))


def test_what_does_not_fit_is_refused(library: Library) -> None:
    packed = pack_linear(library, torch.randn(8, 16))
    for x in (torch.randn(2, 15), torch.randn(16), torch.randn(2, 16).double()):
        with pytest.raises(ValueError, match=r"expected float32 \[m, 16\]"):
            packed(x)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        pack_linear(library, torch.randn(8, 16).half())
