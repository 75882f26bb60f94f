"""Activations in 8 bits on their way to tensor cores, against the definition."""

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import rounded as reference
from tercet.kernels.ops.projection import Norm, normed_sum
from tercet.kernels.ops.quantized import EightBits
from tercet.kernels.triton.linear import rounding

KINDS: list[EightBits] = ["fp8", "int8"]


def made(device: torch.device, *shape: int) -> torch.Tensor:
    """In float16: what the interpreter computes as a GPU does."""
    return torch.randn(shape, device=device).to(torch.float16)


def assert_equal(actual: reference.RoundedRows, expected: reference.RoundedRows, rare: float = 0.001) -> None:
    """Codes are equal, except rare ones next to a tie, which are one step apart: one of 16 in fp8."""
    assert actual.codes.dtype == expected.codes.dtype
    torch.testing.assert_close(actual.scales, expected.scales, rtol=2e-3 if rare > 0.001 else 1e-6, atol=0.0)
    mine, wanted = reference.in_full(actual), reference.in_full(expected)
    step = expected.scales.repeat_interleave(mine.shape[1] // expected.scales.shape[1], 1)
    step = torch.maximum(step, wanted.abs() / 8) if actual.codes.is_floating_point() else step
    far = (mine - wanted).abs()
    assert (far <= step * 1.01).all()
    assert (far > step * 0.1).float().mean() <= rare


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "width"), [(256, 256), (320, 320), (384, 128), (5120, 5120), (640, 128)])
def test_rows(kind: EightBits, size: int, width: int, device: torch.device) -> None:
    x = made(device, 3, size + 16)[:, :size] * 5
    x[2] = 0
    assert_equal(rounding.round_rows(x, kind, width), reference.round_rows(x, kind, width))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize(("size", "width"), [(256, 256), (384, 128)])
def test_rows_after_a_norm(kind: EightBits, summed: bool, size: int, width: int, device: torch.device) -> None:
    x, residual = made(device, 4, size), made(device, 4, size) if summed else None
    norm = Norm(made(device, size), 0.1)
    actual, total = rounding.round_normed(x, residual, norm, kind, width)
    normed, expected_total = normed_sum(x, residual, norm)
    expected = reference.round_rows(normed, kind, width)
    assert torch.equal(total, expected_total)
    assert_equal(actual, expected, rare=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_no_number_stays_so_and_alone(kind: EightBits, bad: float, device: torch.device) -> None:
    x = made(device, 3, 256)
    x[1, 3] = bad
    rounded = reference.in_full(rounding.round_rows(x, kind, 256))
    assert rounded[1].isnan().all()
    assert rounded[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
@pytest.mark.parametrize("n", [48, 1500])
def test_sums_are_scaled(dtype: torch.dtype, n: int, device: torch.device) -> None:
    sums = torch.randint(-1000, 1000, (5, n), device=device).to(dtype)
    scales, weight, bias = torch.rand(5, 1, device=device), torch.rand(n, 1, device=device), made(device, n)
    for given in (None, bias):
        actual = rounding.scale_sums(sums, scales, weight, given, torch.float16)
        expected = sums.float() * scales * weight.t() + (0 if given is None else given.float())
        torch.testing.assert_close(actual.float(), expected, rtol=1e-3, atol=1e-3)


def test_rows_that_are_no_rows_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="cannot be rounded"):
        rounding.round_rows(made(device, 4, 32).t(), "fp8", 4)
