"""The kernel of one row against torch, in float16: what the interpreter computes as a GPU does."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton", reason="the kernels are Triton's")

from tercet.kernels.triton.linear.linear import gemv, supports_gemv


def made(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(torch.float16)


@pytest.mark.parametrize("size", [256, 768, 4096, 6144])
@pytest.mark.parametrize("outputs", [1, 37, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_one_row(device: torch.device, size: int, outputs: int, biased: bool) -> None:
    x, weight = made(device, 1, size), made(device, outputs, size) / size**0.5
    bias = made(device, outputs) if biased else None
    assert supports_gemv(x, weight)
    torch.testing.assert_close(gemv(x, weight, bias), F.linear(x, weight, bias), rtol=4e-3, atol=4e-3)


def test_unsupported_shapes_and_dtypes(device: torch.device) -> None:
    weight = made(device, 40, 512)
    assert not supports_gemv(made(device, 2, 512), weight)
    assert not supports_gemv(made(device, 512), weight)
    assert not supports_gemv(made(device, 1, 512).float(), weight)
    assert not supports_gemv(torch.randn(1, 512, device=device), weight.float())
    assert not supports_gemv(made(device, 1, 100), made(device, 40, 100))
    assert not supports_gemv(made(device, 1, 512), made(device, 512, 40).T)
