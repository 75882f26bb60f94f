import math

import torch

from tercet.kernels.ops.activation import act_and_mul, clamped_and_mul, gelu_and_mul, silu_and_mul


def test_silu_gates_the_second_half() -> None:
    gate, up = [-3.0, 0.5, 8.0], [2.0, -1.0, 0.25]
    expected = [g / (1 + math.exp(-g)) * u for g, u in zip(gate, up, strict=True)]
    torch.testing.assert_close(silu_and_mul(torch.tensor([gate + up])), torch.tensor([expected]))


def test_gelu_is_exact_or_by_tanh() -> None:
    gate, up = [-3.0, 0.5, 2.0], [2.0, -1.0, 0.25]
    exact = [0.5 * g * (1 + math.erf(g / math.sqrt(2))) * u for g, u in zip(gate, up, strict=True)]
    inner = [math.sqrt(2 / math.pi) * (g + 0.044715 * g**3) for g in gate]
    tanh = [0.5 * g * (1 + math.tanh(i)) * u for g, i, u in zip(gate, inner, up, strict=True)]
    x = torch.tensor([gate + up])
    torch.testing.assert_close(gelu_and_mul(x), torch.tensor([exact]))
    torch.testing.assert_close(gelu_and_mul(x, "tanh"), torch.tensor([tanh]))


def test_a_clamped_gate_has_a_limit_above_and_its_up_on_both_sides() -> None:
    gate, up = [-9.0, 0.5, 8.0, 8.0], [2.0, -1.5, 9.0, -9.0]
    kept = zip([-9.0, 0.5, 7.0, 7.0], [2.0, -1.5, 7.0, -7.0], strict=True)
    expected = [g / (1 + math.exp(-1.702 * g)) * (u + 1) for g, u in kept]
    torch.testing.assert_close(clamped_and_mul(torch.tensor([gate + up])), torch.tensor([expected]))


def test_a_gate_by_its_name() -> None:
    x = torch.tensor([[-3.0, 0.5, 2.0, 2.0, -1.0, 0.25]])
    assert torch.equal(act_and_mul(x, "silu"), silu_and_mul(x))
    assert torch.equal(act_and_mul(x, "gelu_tanh"), gelu_and_mul(x, "tanh"))
    assert torch.equal(act_and_mul(x, "clamped"), clamped_and_mul(x))
