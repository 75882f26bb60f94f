import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import rmsnorm as reference
from tercet.kernels.triton import rmsnorm

EPS = 1e-5


@pytest.mark.parametrize("size", [24, 100, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_norm_and_residual(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x, residual, weight = (torch.randn(shape, device=device).to(dtype) for shape in ((5, size), (5, size), (size,)))
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(
        rmsnorm.rmsnorm(x, weight, EPS), reference.rmsnorm(x, weight, EPS), rtol=4 * step, atol=2 * step
    )
    normed, total = rmsnorm.add_rmsnorm(x, residual, weight, EPS)
    expected, expected_total = reference.add_rmsnorm(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    torch.testing.assert_close(normed, expected, rtol=4 * step, atol=2 * step)


def test_a_weight_of_float32(device: torch.device) -> None:
    """To the bit, but where sums in another order make a number fall on the other side of a half."""
    x, weight = torch.randn(200, 64, device=device).half(), torch.randn(64, device=device)
    actual, expected = rmsnorm.rmsnorm(x, weight, EPS), reference.rmsnorm(x, weight, EPS)
    assert actual.dtype == torch.float16
    assert (actual == expected).float().mean() > 0.99
    assert (rmsnorm.rmsnorm(x, weight.half(), EPS) == expected).float().mean() < 0.9


def test_heads_inside_a_projection(device: torch.device) -> None:
    heads = torch.randn(3, 7, 20, device=device)[:, 2:5]
    weight = torch.randn(20, device=device)
    assert not heads.is_contiguous()
    torch.testing.assert_close(rmsnorm.rmsnorm(heads, weight, EPS), reference.rmsnorm(heads, weight, EPS))


def test_unsupported_strides_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="strides"):
        rmsnorm.rmsnorm(torch.zeros(4, 4, device=device).T, torch.ones(4, device=device), EPS)
