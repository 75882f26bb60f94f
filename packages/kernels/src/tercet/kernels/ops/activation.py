"""Gated activations of a fused gate-up projection."""

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x [..., 2 * n] holds gate in its first half and up in its second. Returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor, approximate: Literal["none", "tanh"] = "none") -> torch.Tensor:
    """gelu(gate) * up, halves as in `silu_and_mul`; "tanh" is the approximation Gemma uses. Returns [..., n]."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate) * up
