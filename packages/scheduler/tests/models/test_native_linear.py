"""Linear layers of any module on native kernels, against the same on torch."""

import pytest
import torch
from torch import nn

from tercet.kernels.native.library import load_library, missing_library
from tercet.scheduler.models.native_linear import NativeLinear, use_native_linears

pytestmark = pytest.mark.skipif(bool(missing_library()), reason=missing_library())


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
