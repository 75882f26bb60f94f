"""ModernBERT: rotary positions, gated MLPs, and layers with local attention between layers with full attention.

Module names are those of Hugging Face's checkpoints.
"""

import torch
from torch import nn

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.scheduler.models.config.encoder_config import ModernBertShape
from tercet.scheduler.models.layers.encoder_layers import LayerNorm, Table, activation
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.packed import Packed


class ModernBert(nn.Module):
    """The encoder."""

    def __init__(self, shape: ModernBertShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "tok_embeddings": Table(shape.vocab_size, shape.hidden_size, dtype),
                "norm": _norm(shape, dtype),
            }
        )
        rotary = {slides: _Rotary(shape, slides=slides) for slides in (False, True)}
        self.layers = nn.ModuleList(
            _Layer(shape, number, rotary[shape.slides(number)], dtype) for number in range(shape.num_hidden_layers)
        )
        self.final_norm = _norm(shape, dtype)

    def forward(self, packed: Packed) -> torch.Tensor:
        """Return the hidden states [tokens, hidden]."""
        x: torch.Tensor = self.embeddings["norm"](self.embeddings["tok_embeddings"](packed.input_ids))
        for layer in self.layers:
            x = layer(x, packed)
        normed: torch.Tensor = self.final_norm(x)
        return normed


class ModernBertClassifier(ModernBert):
    """ModernBertForSequenceClassification."""

    def __init__(self, shape: ModernBertShape, labels: int, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        size = shape.hidden_size
        self.head = nn.ModuleDict(
            {"dense": Linear(size, size, bias=shape.classifier_bias, dtype=dtype), "norm": _norm(shape, dtype)}
        )
        self.classifier = Linear(size, labels, bias=True, dtype=dtype)
        self._activation = activation(shape.classifier_activation)
        self._mean = shape.classifier_pooling == "mean"

    def scores(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return scores [inputs, labels] of hidden states [tokens, hidden]."""
        pooled = packed.mean(hidden) if self._mean else packed.first(hidden)
        scores: torch.Tensor = self.classifier(self.head["norm"](self._activation(self.head["dense"](pooled))))
        return scores


class _Rotary(nn.Module):
    """The rotary table of one type of layer."""

    cache: torch.Tensor

    def __init__(self, shape: ModernBertShape, *, slides: bool) -> None:
        super().__init__()
        head_dim = shape.hidden_size // shape.num_attention_heads
        table = rope_cache(shape.max_position_embeddings, head_dim, shape.theta(slides=slides))
        self.register_buffer("cache", table, persistent=False)

    def forward(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return apply_rope(q, k, positions, self.cache)


class _Layer(nn.Module):
    """Attention, then MLP, each on the normalized residual; the first layer uses the embedding's norm."""

    def __init__(self, shape: ModernBertShape, number: int, rotary: _Rotary, dtype: torch.dtype) -> None:
        super().__init__()
        self.attn_norm = _norm(shape, dtype) if number else nn.Identity()
        self.attn = _Attention(shape, number, rotary, dtype)
        self.mlp_norm = _norm(shape, dtype)
        self.mlp = _GatedMLP(shape, dtype)

    def forward(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x), packed)
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _Attention(nn.Module):
    def __init__(self, shape: ModernBertShape, number: int, rotary: _Rotary, dtype: torch.dtype) -> None:
        super().__init__()
        size = shape.hidden_size
        self._number = number
        self._heads = shape.num_attention_heads
        self._head_dim = size // self._heads
        window = shape.local_attention // 2 if shape.slides(number) else 0
        self._params = AttentionParams(scale=self._head_dim**-0.5, window=window)
        self._rotary = rotary
        self.Wqkv = Linear(size, 3 * size, bias=shape.attention_bias, dtype=dtype)
        self.Wo = Linear(size, size, bias=shape.attention_bias, dtype=dtype)

    def forward(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        q, k, v = self.Wqkv(x).view(len(x), 3, self._heads, self._head_dim).unbind(1)
        q, k = self._rotary(q, k, packed.positions)
        seen = packed.attend(self._number, q, k, v, self._params)
        out: torch.Tensor = self.Wo(seen.flatten(1))
        return out


class _GatedMLP(nn.Module):
    def __init__(self, shape: ModernBertShape, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.Wi = Linear(size, 2 * inner, bias=shape.mlp_bias, dtype=dtype)
        self.Wo = Linear(inner, size, bias=shape.mlp_bias, dtype=dtype)
        self._activation = activation(shape.hidden_activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.Wi(x).chunk(2, dim=-1)
        out: torch.Tensor = self.Wo(self._activation(value) * gate)
        return out


def _norm(shape: ModernBertShape, dtype: torch.dtype) -> LayerNorm:
    return LayerNorm(shape.hidden_size, shape.norm_eps, bias=shape.norm_bias, dtype=dtype)
