"""The linear layers of one row against torch, in float16: what the interpreter computes as a GPU does."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton", reason="the kernels are Triton's")

from tercet.kernels.ops.activation import silu_and_mul
from tercet.kernels.triton.linear import gated_linear, linear


def made(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.float16)


@pytest.mark.parametrize("size", [256, 768, 4096, 6144])
@pytest.mark.parametrize("outputs", [1, 37, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_one_row(device: torch.device, size: int, outputs: int, biased: bool) -> None:
    x, weight = made(device, 1, size), made(device, outputs, size) / size**0.5
    bias = made(device, outputs) if biased else None
    torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("size", [512, 2560])
@pytest.mark.parametrize("biased", [False, True])
def test_a_gated_row(device: torch.device, size: int, biased: bool) -> None:
    x, weight = made(device, 1, size), made(device, 2 * 50, size) / size**0.5
    bias = made(device, 2 * 50) if biased else None
    expected = silu_and_mul(F.linear(x, weight, bias))
    torch.testing.assert_close(gated_linear(x, weight, bias), expected, rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("size", [96, 512])
def test_several_rows_are_torchs(device: torch.device, rows: int, size: int) -> None:
    x, weight = made(device, rows, size), made(device, 40, size) / size**0.5
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    expected = silu_and_mul(F.linear(x, weight))
    torch.testing.assert_close(gated_linear(x, weight), expected, rtol=4e-3, atol=4e-3)


def test_a_row_of_odd_size_is_torchs(device: torch.device) -> None:
    x, weight = made(device, 1, 100), made(device, 40, 100)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_what_no_kernel_knows_is_torchs(device: torch.device) -> None:
    x, weight = torch.randn(1, 512, device=device), torch.randn(40, 512, device=device)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    x, weight = made(device, 512, 1).T, made(device, 512, 40).T
    assert torch.equal(linear(x, weight), F.linear(x, weight))
