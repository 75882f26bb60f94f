"""Gated activations of a fused gate-up projection."""

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812

Gate = Literal["silu", "gelu_tanh", "clamped"]
"""What a gate goes through before an up is multiplied by it: see `act_and_mul`."""

LIMIT = 7.0
"""The most that a clamped gate or up can be."""
SLOPE = 1.702
"""What a clamped gate is multiplied by inside its sigmoid."""


def act_and_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Gate times up by the function that `gate` names: x [..., 2 * n] to [..., n]."""
    match gate:
        case "silu":
            return silu_and_mul(x)
        case "gelu_tanh":
            return gelu_and_mul(x, "tanh")
        case "clamped":
            return clamped_and_mul(x)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [..., 2 * n] holds gate in its first half and up in its second. Returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """gelu(gate) * up, halves as in `silu_and_mul`; "tanh" is the approximation Gemma uses. Returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up


def clamped_and_mul(x: torch.Tensor) -> torch.Tensor:
    """What gpt-oss has: (up + 1) * gate * sigmoid(SLOPE * gate), halves as in `silu_and_mul`. Returns [..., n].

    Neither is above LIMIT, and no up below -LIMIT.
    """
    gate, up = x.chunk(2, dim=-1)
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return (up + 1) * (gate * torch.sigmoid(gate * SLOPE))
