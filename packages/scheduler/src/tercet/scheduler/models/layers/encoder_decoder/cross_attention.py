"""Attention of a decoder over the output of an encoder, whose keys and values are computed once."""

from typing import Protocol, cast

import torch

from tercet.kernels.attention.api import AttentionParams
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers.linear import Linear


class CrossBatch(Batch, Protocol):
    """A step whose rows each have an encoded audio clip or text. See `ForwardBatch`."""

    def attend_cross(self, layer_id: int, q: torch.Tensor, params: AttentionParams) -> torch.Tensor:
        """Attend with q [tokens, heads, head_dim] to all keys and values of the tokens' inputs; return q's shape."""
        ...


class UnrotatedAttention(OpsModule):
    """Projections of attention without rotary positions. In Whisper, keys have no bias."""

    def __init__(self, config: ModelConfig, layer_id: int, *, key_bias: bool = False) -> None:
        super().__init__()
        size, dtype = config.hidden_size, config.dtype
        self.layer_id = layer_id
        self.heads = -1, config.heads, config.head_dim
        self.q_proj = Linear(size, size, bias=True, dtype=dtype)
        self.k_proj = Linear(size, size, bias=key_bias, dtype=dtype)
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


class GroupedCrossAttention(CrossAttention):
    """Attention over the output of an encoder with hidden states of its own size, with grouped heads and a soft cap."""

    def __init__(self, config: ModelConfig, layer_id: int, inputs: int) -> None:
        OpsModule.__init__(self)
        size, dtype, queries = config.hidden_size, config.dtype, config.heads * config.head_dim
        keys, bias = config.kv_heads * config.head_dim, config.attention_bias
        self.layer_id = layer_id
        self.heads = -1, config.heads, config.head_dim
        self.q_proj = Linear(size, queries, bias=bias, dtype=dtype)
        self.k_proj = Linear(inputs, keys, bias=bias, dtype=dtype)
        self.v_proj = Linear(inputs, keys, bias=bias, dtype=dtype)
        self.out_proj = Linear(queries, size, bias=config.output_bias, dtype=dtype)
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        self.params = AttentionParams(scale=scale, softcap=config.softcap)
        self._kv_heads = -1, config.kv_heads, config.head_dim

    def keys_values(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [positions, kv_heads, head_dim] of hidden states [positions, inputs]."""
        return self.k_proj(hidden).view(self._kv_heads), self.v_proj(hidden).view(self._kv_heads)
