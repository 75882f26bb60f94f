"""Mixtures of packed experts against plain torch ones: few tokens and many, experts with none of them and with all."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from tercet.kernels.native.library import Library
from tercet.kernels.native.linear import PackedLinear, PackedMLP, Quantization, pack_linear, pack_linears
from tercet.kernels.native.mixture import Mixture
from tercet.kernels.ops.activation import Gate, act_and_mul
from tercet.kernels.ops.linear import linear_int4, linear_int8, quantize_int4, quantize_weight
from tercet.kernels.ops.moe import ExpertBiases, Routing, by_expert, fused_moe, route

TOKENS = [1, 2, 7, 41, 700]
"""The last are more than a wave, whatever experts they have."""
ROUNDED = [("none", 1e-5), ("int8", 0.02), ("int4", 0.02)]
"""How far what is computed may be: of what is gated, a number may be rounded the other way."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)  # of many tokens one may have two experts that are equally likely but for rounding


@dataclass(frozen=True, eq=False)
class MoEWeights:
    """Weights of a mixture of experts, as plain tensors."""

    router: torch.Tensor
    router_bias: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    biases: ExpertBiases

    @classmethod
    def random(cls, count: int, hidden: int, size: int, dtype: torch.dtype = torch.float32) -> "MoEWeights":
        shapes = [(count, hidden), (count,), (count, 2 * size, hidden), (count, hidden, size)]
        router, router_bias, gate_up, down = ((torch.randn(shape) * 3 / shape[-1] ** 0.5).to(dtype) for shape in shapes)
        return cls(
            router, router_bias, gate_up, down, ExpertBiases(torch.randn(count, 2 * size), torch.randn(count, hidden))
        )

    def parts(self, library: Library, quantization: Quantization = "none") -> tuple[PackedLinear, list[PackedMLP]]:
        """Router and experts."""
        pack = partial(pack_linears, library, quantization=quantization)
        gate_ups = pack(self.gate_up, list(self.biases.gate_up), interleave=True)
        experts = list(map(PackedMLP, gate_ups, pack(self.down, list(self.biases.down))))
        return pack_linear(library, self.router, self.router_bias), experts

    def pack(
        self,
        library: Library,
        top_k: int,
        *,
        renormalize: bool = True,
        quantization: Quantization = "none",
        **how: Any,
    ) -> Mixture:
        return Mixture(*self.parts(library, quantization), Routing(top_k=top_k, renormalize=renormalize), **how)

    def route(self, x: torch.Tensor, top_k: int, *, renormalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        logits = torch.nn.functional.linear(x, self.router.float(), self.router_bias.float())
        return route(logits, Routing(top_k=top_k, renormalize=renormalize))

    def one(self, quantization: Quantization, expert: int, x: torch.Tensor) -> torch.Tensor:
        """What an expert gives whose weights are rounded."""
        gated = product(quantization, x, self.gate_up[expert], self.biases.gate_up[expert])
        return product(quantization, act_and_mul(gated, "silu"), self.down[expert], self.biases.down[expert])

    def expected(self, x: torch.Tensor, top_k: int, *, renormalize: bool = True, gate: Gate = "silu") -> torch.Tensor:
        routed = self.route(x, top_k, renormalize=renormalize)
        return fused_moe(x, *routed, self.gate_up.float(), self.down.float(), gate=gate, biases=self.biases)


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize(("count", "top_k", "hidden", "size"), [(6, 3, 48, 32), (1, 1, 33, 17), (20, 2, 64, 100)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_equals_torch(library: Library, count: int, top_k: int, hidden: int, size: int, *, renormalize: bool) -> None:
    weights = MoEWeights.random(count, hidden, size)
    mixture = weights.pack(library, top_k, renormalize=renormalize)
    for tokens in TOKENS:
        x = torch.randn(tokens, hidden)
        assert error(mixture(x), weights.expected(x, top_k, renormalize=renormalize)) < 1e-5


CHOICES = [
    Routing(top_k=3, score="sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2, group_best=2),
    Routing(top_k=5, score="sigmoid"),
    Routing(top_k=3, scale=16.0, groups=4, top_groups=2),
    Routing(top_k=4, renormalize=True, scale=0.5),
]


@pytest.mark.parametrize("routing", CHOICES)
@pytest.mark.parametrize("corrected", [False, True])
def test_scores_are_compared_as_torch_does(library: Library, routing: Routing, *, corrected: bool) -> None:
    weights = MoEWeights.random(16, 48, 32)
    correction = torch.randn(16) / 4 if corrected else None
    mixture = Mixture(*weights.parts(library), routing, correction=correction)
    for tokens in TOKENS:
        x = torch.randn(tokens, 48)
        routed = route(torch.nn.functional.linear(x, weights.router, weights.router_bias), routing, correction)
        assert error(mixture(x), fused_moe(x, *routed, weights.gate_up, weights.down, biases=weights.biases)) < 1e-5


def test_a_correction_is_one_number_for_each_expert(library: Library) -> None:
    parts = MoEWeights.random(4, 32, 16).parts(library)
    with pytest.raises(ValueError, match=r"a correction \[3\] of 4 experts"):
        Mixture(*parts, Routing(top_k=2), correction=torch.zeros(3))


def test_a_shared_expert_without_a_gate_weighs_one(library: Library) -> None:
    weights = MoEWeights.random(4, 32, 16)
    up, down = torch.randn(48, 32) / 5, torch.randn(32, 24) / 5
    shared = PackedMLP(pack_linear(library, up, interleave=True), pack_linear(library, down))
    mixture = weights.pack(library, 2, shared=(None, shared))
    for tokens in TOKENS:
        x = torch.randn(tokens, 32)
        given = torch.nn.functional.linear(act_and_mul(torch.nn.functional.linear(x, up), "silu"), down)
        assert error(mixture(x), weights.expected(x, 2) + given) < 1e-5


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("routing", CHOICES)
def test_whatever_scores_are_the_experts_exist(library: Library, routing: Routing, strange: float) -> None:
    weights = MoEWeights.random(16, 48, 32)
    weights.router_bias.fill_(strange)
    x = torch.randn(20, 48)
    assert Mixture(*weights.parts(library), routing, correction=torch.zeros(16))(x).shape == x.shape


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "clamped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_gates(library: Library, gate: Gate, dtype: torch.dtype) -> None:
    weights = MoEWeights.random(5, 50, 24, dtype)
    x = (4 * torch.randn(30, 50)).to(dtype).float()  # gates and ups beyond the limits of clamped ones
    actual = weights.pack(library, 5, gate=gate)(x)
    assert error(actual, weights.expected(x, 5, gate=gate)) < (1e-5 if dtype == torch.float32 else 0.01)


def product(quantization: Quantization, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What a linear layer gives whose weights and inputs are rounded."""
    match quantization:
        case "none":
            return torch.nn.functional.linear(x, weight, bias)
        case "int8":
            return linear_int8(x, *quantize_weight(weight), bias)
        case "int4":
            return linear_int4(x, *quantize_int4(weight), bias)


@pytest.mark.parametrize(("quantization", "far"), ROUNDED)
def test_rounded_experts_equal_torch_and_routers_are_not_rounded(
    library: Library, quantization: Quantization, far: float
) -> None:
    weights, top_k = MoEWeights.random(7, 70, 40), 3
    mixture = weights.pack(library, top_k, quantization=quantization)
    for tokens in TOKENS:
        x = torch.randn(tokens, 70)
        exact = by_expert(x, *weights.route(x, top_k), 7, partial(weights.one, quantization))
        assert error(mixture(x), exact) < far


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_experts_without_tokens_and_with_all_of_them(library: Library, dtype: torch.dtype) -> None:
    weights = MoEWeights.random(9, 40, 30, dtype)
    weights.router_bias[:] = torch.tensor([0, 0, 99, 0, 0, 0, 50, 0, 0])
    x = torch.randn(20, 40).to(dtype).float()
    for top_k in (1, 2, 9):
        experts = weights.route(x, top_k)[1]
        assert len(set(experts.flatten().tolist())) == top_k
        actual = weights.pack(library, top_k)(x)
        assert error(actual, weights.expected(x, top_k)) < (1e-5 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize(("quantization", "far"), ROUNDED)
def test_a_shared_expert_of_another_size(library: Library, quantization: Quantization, far: float) -> None:
    weights, shared, gate = MoEWeights.random(6, 48, 32), MoEWeights.random(1, 48, 72), torch.randn(1, 48)
    pack = partial(pack_linear, library, quantization=quantization)
    gate_up = pack(shared.gate_up[0], shared.biases.gate_up[0], interleave=True)
    own = PackedMLP(gate_up, pack(shared.down[0], shared.biases.down[0]))
    mixture = weights.pack(library, 2, quantization=quantization, shared=(pack_linear(library, gate), own))
    for tokens in TOKENS:
        x = torch.randn(tokens, 48)
        exact = by_expert(x, *weights.route(x, 2), 6, partial(weights.one, quantization))
        exact += (x @ gate.T).sigmoid() * shared.one(quantization, 0, x)
        assert error(mixture(x), exact) < far


def test_of_experts_that_are_equally_likely_the_first_are_taken(library: Library) -> None:
    weights = MoEWeights.random(40, 32, 16)
    weights.router.zero_()
    weights.router_bias.zero_()
    weights.router_bias[7] = 1
    x = torch.randn(5, 32)
    probabilities = weights.router_bias.softmax(0)[[7, 0, 1]]
    exact = fused_moe(
        x,
        (probabilities / probabilities.sum()).expand(5, 3),
        torch.tensor([[7, 0, 1]]).expand(5, 3),
        weights.gate_up,
        weights.down,
        biases=weights.biases,
    )
    assert error(weights.pack(library, 3)(x), exact) < 1e-5


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_no_token_changes_another_nor_do_threads(library: Library, quantization: Quantization) -> None:
    weights = MoEWeights.random(12, 96, 48)
    mixture = weights.pack(library, 4, quantization=quantization)
    x, before = torch.randn(600, 96), library.threads
    together = []
    try:
        for threads in (1, 2, 5):
            library.set_threads(threads)
            together.append(mixture(x))
    finally:
        library.set_threads(before)
    assert all(torch.equal(each, together[0]) for each in together)
    assert torch.equal(torch.cat([mixture(rows) for rows in torch.split(x[:9], 1)]), together[0][:9])
    assert torch.equal(torch.cat([mixture(rows) for rows in torch.split(x, 250)]), together[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_with_its_token(library: Library, value: float) -> None:
    weights = MoEWeights.random(6, 40, 24)
    mixture, x = weights.pack(library, 3), torch.randn(8, 40)
    right = mixture(x)
    x[3, 5] = value
    wrong = mixture(x)
    others = [row for row in range(8) if row != 3]
    assert torch.equal(wrong[others], right[others])
    assert wrong[3].isnan().any()


def test_what_does_not_fit_together_is_refused(library: Library) -> None:
    weights, other = MoEWeights.random(4, 32, 16), MoEWeights.random(1, 32, 20)
    for top_k in (0, 5):
        with pytest.raises(ValueError, match="of 4 experts"):
            weights.pack(library, top_k)
    mixture = weights.pack(library, 2)
    with pytest.raises(ValueError, match=r"expected float32 \[tokens, 32\]"):
        mixture(torch.randn(3, 31))
    pack = partial(pack_linear, library)
    gate_up, down = pack(weights.gate_up[0], interleave=True), pack(weights.down[0])
    good = PackedMLP(gate_up, down)
    for experts in (
        [good] * 3,
        [*[good] * 3, PackedMLP(gate_up, pack(other.down[0]))],
        [*[good] * 3, PackedMLP(gate_up, pack(torch.randn(31, 16)))],
        [*[good] * 3, PackedMLP(pack(torch.randn(32, 31), interleave=True), down)],
    ):
        with pytest.raises(ValueError, match="a layer's weights are"):
            Mixture(mixture.router, experts, Routing(top_k=2, renormalize=True))
    rounded = PackedMLP(gate_up, pack(weights.down[0], quantization="int8"))
    with pytest.raises(ValueError, match="of one format"):
        Mixture(mixture.router, [*[good] * 3, rounded], Routing(top_k=2, renormalize=True))
    with pytest.raises(ValueError, match="a layer's weights are"):
        weights.pack(library, 2, shared=(pack(torch.randn(2, 32)), good))
    with pytest.raises(ValueError, match="of one format"):
        weights.pack(library, 2, shared=(pack(torch.randn(1, 32).bfloat16()), good))
