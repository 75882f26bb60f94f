"""Attention of a decoder over the output of an encoder, whose keys and values are computed once."""

from typing import Protocol, cast

import torch

from tercet.kernels.attention.api import AttentionParams
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers.linear import Linear


class CrossBatch(Batch, Protocol):
    """A step whose rows each have an encoded audio. See `ForwardBatch`."""

    def attend_cross(self, layer_id: int, q: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim] to all keys and values of the tokens' audio; return q's shape."""
        ...


class UnrotatedAttention(OpsModule):
    """Projections of attention without rotary positions. Keys have no bias, as in Whisper."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        size, dtype = config.hidden_size, config.dtype
        self.layer_id = layer_id
        self.heads = -1, config.heads, config.head_dim
        self.q_proj = Linear(size, size, bias=True, dtype=dtype)
        self.k_proj = Linear(size, size, bias=False, dtype=dtype)
        self.v_proj = Linear(size, size, bias=True, dtype=dtype)
        self.out_proj = Linear(size, size, bias=True, dtype=dtype)
        self.params = AttentionParams(scale=config.head_dim**-0.5)

    def keys_values(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [positions, heads, head_dim] of hidden states [positions, hidden]."""
        return self.k_proj(hidden).view(self.heads), self.v_proj(hidden).view(self.heads)


class CrossAttention(UnrotatedAttention):
    """Attention over the encoder's output."""

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden]."""
        q = self.q_proj(x).view(self.heads)
        attended = cast("CrossBatch", batch).attend_cross(self.layer_id, q, self.params)
        out: torch.Tensor = self.out_proj(attended.flatten(1))
        return out
