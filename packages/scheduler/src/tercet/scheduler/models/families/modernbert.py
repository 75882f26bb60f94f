"""ModernBERT: rotary positions, gated MLPs, and layers with local attention between layers with full attention.

Module names are those of Hugging Face's checkpoints.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import nn

from tercet.kernels.attention.api import AttentionParams
from tercet.kernels.ops.rope import apply_rope, rope_cache
from tercet.scheduler.file_fields import FileFields, Only
from tercet.scheduler.models.config.encoder_config import (
    FIELDS_OF_ALL,
    HEADS,
    KERNELS,
    NO_EFFECT,
    REFUSED,
    TRAINING,
    Layers,
    Real,
    Size,
    parse_shape,
)
from tercet.scheduler.models.config.model_config import saved_torch_dtype
from tercet.scheduler.models.family import EncoderFamily, EncoderModel
from tercet.scheduler.models.layers.encoder_layers import LayerNorm, Table, activation
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.packed import Packed

LayerType = Literal["full_attention", "sliding_attention"]
FIELDS = FileFields(
    honoured=FIELDS_OF_ALL
    | {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    | {"hidden_activation", "max_position_embeddings", "norm_eps", "norm_bias", "attention_bias", "mlp_bias"}
    | {"local_attention", "layer_types", "global_attn_every_n_layers", "rope_parameters", "global_rope_theta"}
    | {"local_rope_theta", "classifier_pooling", "classifier_bias", "classifier_activation"},
    no_effect=NO_EFFECT
    | {
        "attention_dropout": TRAINING,
        "decoder_bias": HEADS,
        "deterministic_flash_attn": KERNELS,
        "embedding_dropout": TRAINING,
        "initializer_cutoff_factor": TRAINING,
        "mlp_dropout": TRAINING,
        "pad_token_id": "inputs are not padded",
        "position_embedding_type": "transformers does not read it",
        "reference_compile": KERNELS,
        "repad_logits_with_grad": TRAINING,
        "sparse_pred_ignore_index": HEADS,
        "sparse_prediction": HEADS,
    },
    refused=REFUSED
    | {
        "sliding_window": Only("only local_attention, twice as much, is read"),
        "head_dim": Only("it must be left out: it is hidden_size / num_attention_heads"),
        "rope_scaling": Only(
            "only rotation without scaling is supported", ({"rope_type": "default"}, {"type": "default"})
        ),
    },
)


class RopeShape(msgspec.Struct, frozen=True, kw_only=True):
    """The rotary embedding of one type of layer, in the format of transformers 5."""

    rope_theta: Real | None = None
    rope_type: Literal["default"] = "default"


class ModernBertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The config of ModernBERT."""

    vocab_size: Size
    hidden_size: Size = 768
    num_hidden_layers: Layers = 22
    num_attention_heads: Size = 12
    intermediate_size: Size = 1152
    hidden_activation: str = "gelu"
    max_position_embeddings: Size = 8192
    norm_eps: Real = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    local_attention: Annotated[int, msgspec.Meta(ge=2, le=2**31 - 1)] = 128
    layer_types: list[LayerType] = []
    global_attn_every_n_layers: Size = 3
    rope_parameters: dict[LayerType, RopeShape] = {}
    global_rope_theta: Real = 160_000.0
    local_rope_theta: Real = 10_000.0
    classifier_pooling: Literal["cls", "mean"] = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"

    def slides(self, layer: int) -> bool:
        """Return whether a layer has local attention."""
        if self.layer_types:
            return self.layer_types[layer] == "sliding_attention"
        return layer % self.global_attn_every_n_layers != 0

    def theta(self, *, slides: bool) -> float:
        """Return the rotary base of a type of layer."""
        given = self.rope_parameters.get("sliding_attention" if slides else "full_attention")
        if given is not None and given.rope_theta is not None:
            return given.rope_theta
        return self.local_rope_theta if slides else self.global_rope_theta


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


def build(config: Mapping[str, Any], labels: Sequence[str], dtype: str, longest: int | None) -> EncoderModel:
    """Build an encoder, or a classifier if there are labels."""
    shape = parse_shape(config, ModernBertShape, FIELDS)
    positions = min(shape.max_position_embeddings, longest or shape.max_position_embeddings)
    shape = msgspec.structs.replace(shape, max_position_embeddings=positions)
    kind = saved_torch_dtype(config, dtype)
    module = ModernBertClassifier(shape, len(labels), kind) if labels else ModernBert(shape, kind)
    return EncoderModel(
        module=module,
        scores=module.scores if isinstance(module, ModernBertClassifier) else None,
        context_length=positions,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        labels=labels,
        dtype=kind,
    )


FAMILIES = (EncoderFamily(architectures=("ModernBertModel",), build=build),)
