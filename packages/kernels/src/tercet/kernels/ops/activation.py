"""Gated activations of a fused gate-up projection."""

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812

Gate = Literal["silu", "gelu_tanh"]
"""What a gate goes through before an up is multiplied by it."""


def act_and_mul(x: torch.Tensor, gate: Gate) -> torch.Tensor:
    """The one of the following that has this gate."""
    return silu_and_mul(x) if gate == "silu" else gelu_and_mul(x, "tanh")


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [..., 2 * n] holds gate in its first half and up in its second. Returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """gelu(gate) * up, halves as in `silu_and_mul`; "tanh" is the approximation Gemma uses. Returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up
