"""Linear layers of any module on native kernels, against the same on torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tercet.kernels.native.library import load_library, missing_library
from tercet.kernels.native.linear import Quantization
from tercet.scheduler.models.layers.decoder import CausalLM
from tercet.scheduler.models.layers.layer_ops import Batch
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.native_linear import NativeLinear, use_native_linears, use_native_projections
from tercet.scheduler.models.registry import build_model, load_config
from tercet.scheduler.models.weights.weights import load_weights

pytestmark = pytest.mark.skipif(bool(missing_library()), reason=missing_library())


QUANTIZATIONS: tuple[Quantization, ...] = "none", "int8", "int4"


class Odd(nn.Linear):
    """Computes something else than its name says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


class Network(nn.Module):
    """An embedding that is the head, too, and layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 24)
        self.layers = nn.ModuleList([nn.Linear(24, 56), nn.Linear(56, 24, bias=False), Odd(24, 24)])
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


@pytest.fixture
def network() -> Network:
    torch.manual_seed(3)
    return Network()


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "far"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_the_same_comes_out(network: Network, dtype: torch.dtype, far: float) -> None:
    network.to(dtype)
    ids = torch.arange(40).view(2, 20)
    expected = network(ids)
    assert use_native_linears(network, load_library()) == 3
    actual = network(ids)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=far)


def test_weights_are_gone_but_those_that_others_read(network: Network) -> None:
    use_native_linears(network, load_library())
    assert {name: parameter.numel() for name, parameter in network.named_parameters() if parameter.numel()} == {
        "embedding.weight": 40 * 24,
        "layers.2.weight": 24 * 24,
        "layers.2.bias": 24,
    }
    first = network.layers[0]
    assert isinstance(first, NativeLinear)
    assert first.weight.dtype == torch.float32, "for who asks"


@torch.inference_mode()
def test_weights_are_rounded(network: Network) -> None:
    ids = torch.arange(40)
    exact, far = network(ids), {}
    for quantization in ("int8", "int4"):
        torch.manual_seed(3)
        rounded = Network()
        use_native_linears(rounded, load_library(), quantization)
        far[quantization] = (rounded(ids) - exact).abs().mean() / exact.abs().mean()
    assert 0 < far["int8"] < 0.02 < far["int4"] < 0.2


class Blind(Batch):
    """A step in which every token attends to itself alone."""

    replaced = None

    def attend(self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, params: Any) -> torch.Tensor:
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)


@torch.inference_mode()
def logits(model: CausalLM) -> torch.Tensor:
    tokens = torch.arange(40)
    return model.compute_logits(model(tokens, tokens, Blind()))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe", "llama", "llama_tied"])
@pytest.mark.parametrize(("dtype", "far"), [("float32", 1e-4), ("bfloat16", 0.6)])
def test_the_same_comes_out_of_our_layers(
    family: str, dtype: str, far: float, checkpoints: Callable[[str], Path]
) -> None:
    model = build_model(load_config(checkpoints(family), dtype))
    load_weights(model, checkpoints(family))
    expected = logits(model)
    assert use_native_projections(model, load_library())
    assert not any(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    actual = logits(model)
    assert actual.dtype == torch.float32, "as native sampling reads them"
    assert (actual - expected).abs().mean() < far / 4
    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=far)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen2_moe", "llama_tied"])
def test_all_but_routers_is_rounded(family: str, checkpoints: Callable[[str], Path]) -> None:
    exact, far = torch.empty(0), {}
    for quantization in QUANTIZATIONS:
        model = build_model(load_config(checkpoints(family)))
        load_weights(model, checkpoints(family))
        exact = logits(model) if quantization == "none" else exact
        routed = [router_logits(module) for module in model.modules() if isinstance(module, MixtureOfExperts)]
        assert use_native_projections(model, load_library(), quantization)
        routers = [router_logits(module) for module in model.modules() if isinstance(module, MixtureOfExperts)]
        torch.testing.assert_close(routers, routed, rtol=0, atol=1e-5)
        far[quantization] = ((logits(model) - exact).abs().mean() / exact.abs().mean()).item()
    assert far["none"] < 1e-5 < far["int8"] < far["int4"] < 0.6
    assert far["int8"] < 0.1


@torch.inference_mode()
def router_logits(mixture: MixtureOfExperts) -> torch.Tensor:
    rows = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    logits: torch.Tensor = mixture.gate(rows)
    return logits
