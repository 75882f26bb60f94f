"""The layers that decoder-only models are made of: plain modules over flat tokens, with fused projections.

A batch has no batch dimension: every tensor is [tokens, ...], and `Batch.attend` knows which token belongs to whom.
"""

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tercet.kernels.ops.activation import silu_and_mul
from tercet.kernels.ops.rmsnorm import add_rmsnorm, rmsnorm
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.scheduler.executor.model_config import ModelConfig
from tercet.scheduler.models.shard import Shard


class Batch(Protocol):
    """What a model needs of the step it is part of."""

    def attend(
        self, layer_id: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, window: int = 0
    ) -> torch.Tensor:
        """Cache k and v [tokens, kv_heads, head_dim]; the attention of q [tokens, heads, head_dim], of q's shape."""
        ...


class Linear(nn.Module):
    """x @ weight.T + bias."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(outputs, inputs, dtype=dtype)
        self.bias = _parameter(outputs, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs]."""
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Projections of one input, computed as one: `parts` maps each one's name in checkpoints to its outputs."""

    def __init__(self, inputs: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(inputs, sum(parts.values()), bias=bias, dtype=dtype)
        self.parts = parts


class RMSNorm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return rmsnorm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalised x + residual, x + residual); a model's first norm has no residual yet."""
        if residual is None:
            return self(x), x
        return add_rmsnorm(x, residual, self.weight, self.eps)


class Rotary(nn.Module):
    """Rotary position embedding from a table of every position, which all layers share."""

    cache: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        table = rope_cache(config.context_length, config.head_dim, config.rope.theta, config.rope.scaling)
        self.register_buffer("cache", table, persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q and k [tokens, heads, head_dim] to their positions [tokens]."""
        return apply_rope(q, k, positions, self.cache)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, and what families add: biases, and norms of queries and keys."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        rotary: Rotary,
        shard: Shard,
        *,
        input_bias: bool = False,
        output_bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.layer_id = layer_id
        self.window = config.window_of(layer_id)
        self.heads = shard.share(config.heads, "attention heads")
        self.kv_heads = shard.share(config.kv_heads, "key-value heads")
        self.head_dim = config.head_dim
        self.rotary = rotary
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, bias=input_bias, dtype=config.dtype)
        self.o_proj = Linear(queries, config.hidden_size, bias=output_bias, dtype=config.dtype)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.dtype) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps, config.dtype) if qk_norm else None

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        q, k, v = self.qkv_proj(x).view(len(x), -1, self.head_dim).split([self.heads, self.kv_heads, self.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, k, positions)
        out = batch.attend(self.layer_id, q, k, v, scale=self.head_dim**-0.5, window=self.window)
        projected: torch.Tensor = self.o_proj(out.flatten(1))
        return projected


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, shard: Shard, *, bias: bool = False) -> None:
        super().__init__()
        size = shard.share(config.intermediate_size, "MLP columns")
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = FusedLinear(config.hidden_size, parts, bias=bias, dtype=config.dtype)
        self.down_proj = Linear(size, config.hidden_size, bias=bias, dtype=config.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out


class Embedding(nn.Module):
    """One vector for each token id."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = _parameter(config.vocab_size, config.hidden_size, dtype=config.dtype)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]."""
        return F.embedding(input_ids, self.weight)


def _parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Uninitialised: weights are loaded into it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
