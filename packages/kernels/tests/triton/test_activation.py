from typing import get_args

import pytest
import torch

pytest.importorskip("triton", reason="these are Triton's kernels")

from tercet.kernels.ops import activation as reference
from tercet.kernels.ops.activation import Gate
from tercet.kernels.triton import activation


@pytest.mark.parametrize("size", [6, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gated_activations(size: int, dtype: torch.dtype, device: torch.device) -> None:
    x = (torch.randn(2, 3, 2 * size, device=device) * 4).to(dtype)
    step = torch.finfo(dtype).eps
    pairs = [(activation.silu_and_mul(x), reference.silu_and_mul(x))]
    pairs += [(activation.gelu_and_mul(x, "none"), reference.gelu_and_mul(x, "none"))]
    pairs += [(activation.gelu_and_mul(x, "tanh"), reference.gelu_and_mul(x, "tanh"))]
    pairs += [(activation.act_and_mul(x, gate), reference.act_and_mul(x, gate)) for gate in get_args(Gate)]
    for actual, expected in pairs:
        torch.testing.assert_close(actual, expected, rtol=8 * step, atol=max(5e-6, 8 * step))
