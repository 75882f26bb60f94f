"""Gated activations of a fused gate-up projection."""

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812

Gate = Literal["silu", "gelu_tanh", "clamped"]
"""Activation of the gate, before it is multiplied by up: see `act_and_mul`."""

LIMIT = 7.0
"""Upper bound of a clamped gate or up."""
SLOPE = 1.702
"""Factor of a clamped gate inside its sigmoid."""


def act_and_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Apply the gated activation that `gate` names: x [..., 2 * n] to [..., n]."""
    match gate:
        case "silu":
            return silu_and_mul(x)
        case "gelu_tanh":
            return gelu_and_mul(x, "tanh")
        case "clamped":
            return clamped_and_mul(x)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return relu(x)**2, the activation of MLPs without a gate."""
    return F.relu(x).square()


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up [..., n], where the first half of x [..., 2 * n] is gate and the second up."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """Return gelu(gate) * up [..., n], halves as in `silu_and_mul`; Gemma uses the approximation "tanh"."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def clamped_and_mul(x: torch.Tensor) -> torch.Tensor:
    """Return (up + 1) * gate * sigmoid(SLOPE * gate) [..., n], halves as in `silu_and_mul`, as gpt-oss does.

    gate is at most LIMIT, and up within -LIMIT and LIMIT.
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))
