import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import moe as reference
from tercet.kernels.ops.quantised import Format, quantise
from tercet.kernels.triton.moe import align, fused_moe


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts(tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(tokens, 40, device=device).to(dtype)
    gate_up, down = torch.randn(6, 48, 40, device=device) / 6, torch.randn(6, 40, 24, device=device) / 5
    weights, experts = reference.route(torch.randn(tokens, 6, device=device), 2, renormalise=True)
    given = (x, weights, experts, gate_up.to(dtype), down.to(dtype))
    tolerance = 8 * torch.finfo(dtype).eps if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(fused_moe(*given), reference.fused_moe(*given), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize(
    ("kind", "block"), [("fp8", (1, 32)), ("fp8", (24, 64)), ("int8", (1, 96)), ("int4", (1, 32)), ("int4", (1, 96))]
)
def test_quantised_experts(tokens: int, kind: Format, block: tuple[int, int], device: torch.device) -> None:
    x = torch.randn(tokens, 96, device=device)
    gate_up, down = (
        reference.QuantisedExperts(quantise(torch.randn(4 * n, 96, device=device) / 8, kind, block), 4)
        for n in (192, 96)
    )
    weights, experts = reference.route(torch.randn(tokens, 4, device=device), 2, renormalise=True)
    given = (x, weights, experts, gate_up, down)
    torch.testing.assert_close(fused_moe(*given), reference.fused_moe(*given), rtol=1e-5, atol=1e-5)


def test_every_pair_lies_in_one_tile_of_its_expert(device: torch.device) -> None:
    experts = torch.tensor([[4, 0], [4, 1], [4, 0], [0, 4]], device=device)
    pairs, expert_of = align(experts, 5, 2)
    assert expert_of.tolist() == [0, 0, 1, 4, 4, 5, 5, 5, 5]
    assert pairs.view(-1, 2).tolist() == [[1, 5], [6, 8], [3, 8], [0, 2], [4, 7], *[[8, 8]] * 4]
