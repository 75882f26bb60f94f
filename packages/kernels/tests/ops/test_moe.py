import pytest
import torch

from tercet.kernels.ops.activation import clamped_and_mul
from tercet.kernels.ops.moe import ExpertBiases, QuantizedExperts, Routing, fused_moe, route
from tercet.kernels.ops.quantized import Format, dequantize, quantize


def token_by_token(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The definition, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for weight, expert in zip(weights[token].double(), experts[token], strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += weight * (down[expert].double() @ (gate / (1 + (-gate).exp()) * up))
    return out


@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 6, 2), (40, 6, 3), (5, 64, 8), (9, 3, 3), (0, 4, 2)])
def test_every_token_goes_through_its_experts(tokens: int, count: int, top_k: int) -> None:
    torch.manual_seed(0)
    x, logits = torch.randn(tokens, 12), torch.randn(tokens, count)
    gate_up, down = torch.randn(count, 10, 12) / 3, torch.randn(count, 12, 5) / 2
    weights, experts = route(logits, Routing(top_k=top_k, renormalize=False))
    out = fused_moe(x, weights, experts, gate_up, down)
    torch.testing.assert_close(out.double(), token_by_token(x, weights, experts, gate_up, down), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "block"), [("fp8", (16, 32)), ("int8", (1, 64)), ("int4", (1, 32)), ("mxfp4", (1, 32))]
)
def test_quantised_experts_are_those_they_stand_for(kind: Format, block: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 64)
    weights, experts = route(torch.randn(20, 3), Routing(top_k=2, renormalize=True))
    gate_up, down = (quantize(torch.randn(3 * n, 64) / 8, kind, block) for n in (128, 64))
    out = fused_moe(x, weights, experts, QuantizedExperts(gate_up, 3), QuantizedExperts(down, 3))
    expected = fused_moe(x, weights, experts, dequantize(gate_up).view(3, 128, 64), dequantize(down).view(3, 64, 64))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_each_expert_has_biases_and_the_gate_that_is_named() -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(9, 12), torch.randn(4, 10, 12), torch.randn(4, 12, 5)
    biases = ExpertBiases(torch.randn(4, 10), torch.randn(4, 12))
    weights, experts = route(torch.randn(9, 4), Routing(top_k=2, renormalize=True))
    out = fused_moe(x, weights, experts, gate_up, down, gate="clamped", biases=biases)
    expected = torch.zeros(9, 12)
    for token in range(9):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            acted = clamped_and_mul(gate_up[expert] @ x[token] + biases.gate_up[expert])
            expected[token] += weight * (down[expert] @ acted + biases.down[expert])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_experts_without_a_gate_have_up_and_down_alone() -> None:
    torch.manual_seed(0)
    x, up, down = torch.randn(9, 12), torch.randn(4, 7, 12), torch.randn(4, 12, 7)
    weights, experts = route(torch.randn(9, 4), Routing(top_k=2))
    out = fused_moe(x, weights, experts, up, down, gate=None)
    each = torch.einsum("edh,teh->ted", down, torch.einsum("ehd,td->teh", up, x).clamp(min=0) ** 2)
    expected = (each[torch.arange(9)[:, None], experts] * weights[..., None]).sum(1)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_no_scale_belongs_to_two_experts() -> None:
    weight = quantize(torch.randn(96, 64), "fp8", (64, 64))
    with pytest.raises(ValueError, match="96 rows in blocks of 64 are no 3 experts"):
        QuantizedExperts(weight, 3)


def test_results_are_added_up_in_float32() -> None:
    """1 + 256 of what bfloat16 adds to 1 as nothing."""
    x, small = torch.ones(1, 1, dtype=torch.bfloat16), 2.0**-9
    gate_up = torch.tensor([[[100.0], [0.01]]] * 257).bfloat16()
    down = torch.ones(257, 1, 1).bfloat16()
    weights = torch.tensor([[1.0] + [small] * 256])
    one = fused_moe(x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int64), gate_up, down)
    out = fused_moe(x, weights, torch.arange(257)[None], gate_up, down)
    assert out.dtype == torch.bfloat16
    assert out.item() == pytest.approx(1.5 * one.item(), rel=2**-8)


def test_weights_are_the_softmax_of_the_router() -> None:
    weights, experts = route(torch.tensor([[0.0, 2.0, 1.0]]), Routing(top_k=2, renormalize=True))
    assert experts.tolist() == [[1, 2]]
    assert weights.tolist() == [pytest.approx([1 / (1 + 2.718281828**-1), 1 / (1 + 2.718281828)])]
    assert route(torch.zeros(1, 4), Routing(top_k=2, renormalize=False))[0].tolist() == [[0.25, 0.25]]


def reference_route(logits: torch.Tensor, routing: Routing, correction: torch.Tensor) -> dict[int, float]:
    """The experts of one token and what they weigh, in float64."""
    scores = logits.double().sigmoid() if routing.score == "sigmoid" else logits.double().softmax(-1)
    corrected = (scores + correction).tolist()
    size = len(corrected) // routing.groups
    groups = [range(first, first + size) for first in range(0, len(corrected), size)]
    worth = [sum(sorted(map(corrected.__getitem__, group))[-routing.group_best :]) for group in groups]
    best = sorted(range(len(groups)), key=worth.__getitem__)[-routing.top_groups :]
    within = [expert for group in best for expert in groups[group]]
    chosen = sorted(within, key=corrected.__getitem__)[-routing.top_k :]
    total = sum(float(scores[expert]) for expert in chosen) if routing.renormalize else 1.0
    return {expert: float(scores[expert]) / total * routing.scale for expert in chosen}


@pytest.mark.parametrize(
    "routing",
    [
        Routing(top_k=3, score="sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2, group_best=2),
        Routing(top_k=5, score="sigmoid"),
        Routing(top_k=3, scale=16.0, groups=4, top_groups=2),
        Routing(top_k=4, renormalize=True, scale=0.5),
    ],
)
def test_scores_are_corrected_grouped_and_scaled(routing: Routing) -> None:
    torch.manual_seed(0)
    logits, correction = torch.randn(50, 16), torch.randn(16) / 10
    weights, experts = route(logits, routing, correction)
    for token in range(50):
        expected = reference_route(logits[token], routing, correction.double())
        assert sorted(experts[token].tolist()) == sorted(expected)
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            assert weight == pytest.approx(expected[expert], rel=1e-5)


def test_a_token_that_no_expert_scores_for_gets_nothing() -> None:
    weights, _ = route(torch.full((1, 4), -1000.0), Routing(top_k=2, score="sigmoid", renormalize=True))
    assert weights.tolist() == [[0.0, 0.0]]
    assert route(torch.zeros(0, 4), Routing(top_k=2, groups=2))[0].shape == (0, 2)
