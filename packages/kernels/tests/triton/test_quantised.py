import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import quantised as reference
from tercet.kernels.triton.quantised import linear_quantised

BLOCKS = {"fp8": [(128, 128), (1, 4096), (4096, 4096)], "int8": [(1, 4096)], "int4": [(1, 32), (1, 128)]}


@pytest.mark.parametrize(("kind", "block"), [(kind, block) for kind, blocks in BLOCKS.items() for block in blocks])
@pytest.mark.parametrize("m", [1, 20])
def test_linear(kind: reference.Format, block: tuple[int, int], m: int, device: torch.device) -> None:
    weight = reference.quantise(torch.randn(50, 288, device=device) * torch.rand(50, 1, device=device), kind, block)
    x, bias = torch.randn(2, m, 288, device=device), torch.randn(50, device=device)
    for given in (None, bias):
        actual, expected = linear_quantised(x, weight, given), reference.linear_quantised(x, weight, given)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-5)


def test_zeros_of_their_own_and_half_precision(device: torch.device) -> None:
    codes = torch.randint(0, 16, (40, 64), dtype=torch.uint8, device=device)
    scales, zeros = torch.rand(40, 2, device=device), torch.randint(0, 16, (40, 2), device=device).float()
    weight = reference.QuantisedWeight(
        format="int4", codes=reference.pack_int4(codes), scales=scales, zeros=zeros, block=(1, 32)
    )
    x = torch.randn(3, 64, device=device).half()
    torch.testing.assert_close(linear_quantised(x, weight), reference.linear_quantised(x, weight), rtol=4e-3, atol=4e-2)


def test_blocks_it_cannot_cut_are_refused(device: torch.device) -> None:
    weight = reference.quantise(torch.ones(4, 96, device=device), "int8", (1, 48))
    with pytest.raises(ValueError, match="blocks of 48 columns"):
        linear_quantised(torch.ones(1, 96, device=device), weight)
