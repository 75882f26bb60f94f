"""Bert and related encoders: MiniLM is one; Roberta and XLM-Roberta differ in positions and classifier.

Module names are those of Hugging Face's checkpoints, except for the fused projection of queries, keys and values.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import torch
from torch import nn

from tercet.kernels.attention.api import AttentionParams
from tercet.scheduler.file_fields import FileFields
from tercet.scheduler.models.config.encoder_config import (
    FIELDS_OF_ALL,
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
from tercet.scheduler.models.layers.linear import FusedLinear, Linear
from tercet.scheduler.models.layers.packed import Packed
from tercet.scheduler.models.layers.shard import Cut

FIELDS = FileFields(
    honoured=FIELDS_OF_ALL
    | {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act"}
    | {"max_position_embeddings", "type_vocab_size", "layer_norm_eps", "pad_token_id", "position_embedding_type"},
    no_effect=NO_EFFECT
    | {
        "attention_probs_dropout_prob": TRAINING,
        "chunk_size_feed_forward": "parts of a layer give the same numbers",
        "hidden_dropout_prob": TRAINING,
    },
    refused=REFUSED,
)
"""Fields of Bert, Roberta, XLM-Roberta and Camembert."""


class BertShape(msgspec.Struct, frozen=True, kw_only=True):
    """The config of Bert, Roberta and XLM-Roberta."""

    vocab_size: Size
    hidden_size: Size = 768
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 12
    intermediate_size: Size = 3072
    hidden_act: str = "gelu"
    max_position_embeddings: Size = 512
    type_vocab_size: Size = 2
    layer_norm_eps: Real = 1e-12
    pad_token_id: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 1
    """Roberta counts positions from the one after it."""
    position_embedding_type: Literal["absolute"] = "absolute"


class Bert(nn.Module):
    """The encoder. Roberta's positions count from `pad` + 1; padding tokens have position `pad`."""

    def __init__(self, shape: BertShape, dtype: torch.dtype, *, pad: int | None = None) -> None:
        super().__init__()
        self.embeddings = _Embeddings(shape, dtype, pad)
        self.encoder = nn.ModuleDict(
            {"layer": nn.ModuleList(_Layer(shape, number, dtype) for number in range(shape.num_hidden_layers))}
        )

    def forward(self, packed: Packed) -> torch.Tensor:
        """Return the hidden states [tokens, hidden]."""
        x: torch.Tensor = self.embeddings(packed)
        layers = self.encoder["layer"]
        assert isinstance(layers, nn.ModuleList)
        for layer in layers:
            x = layer(x, packed)
        return x


class BertClassifier(Bert):
    """BertForSequenceClassification: the pooled vector of the first token, then one score for each label."""

    def __init__(self, shape: BertShape, labels: int, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype)
        size = shape.hidden_size
        self.pooler = nn.ModuleDict({"dense": Linear(size, size, bias=True, dtype=dtype)})
        self.classifier = Linear(size, labels, bias=True, dtype=dtype)

    def scores(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return scores [inputs, labels] of hidden states [tokens, hidden]."""
        scores: torch.Tensor = self.classifier(self.pooler["dense"](packed.first(hidden)).tanh())
        return scores


class RobertaClassifier(Bert):
    """RobertaForSequenceClassification."""

    def __init__(self, shape: BertShape, labels: int, dtype: torch.dtype, *, pad: int) -> None:
        super().__init__(shape, dtype, pad=pad)
        size = shape.hidden_size
        self.classifier = nn.ModuleDict(
            {
                "dense": Linear(size, size, bias=True, dtype=dtype),
                "out_proj": Linear(size, labels, bias=True, dtype=dtype),
            }
        )

    def scores(self, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return scores [inputs, labels] of hidden states [tokens, hidden]."""
        scores: torch.Tensor = self.classifier["out_proj"](self.classifier["dense"](packed.first(hidden)).tanh())
        return scores


class _Embeddings(nn.Module):
    """The sum of token, position and type embeddings."""

    def __init__(self, shape: BertShape, dtype: torch.dtype, pad: int | None) -> None:
        super().__init__()
        size = shape.hidden_size
        self.word_embeddings = Table(shape.vocab_size, size, dtype)
        self.position_embeddings = Table(shape.max_position_embeddings, size, dtype)
        self.token_type_embeddings = Table(shape.type_vocab_size, size, dtype)
        self.LayerNorm = LayerNorm(size, shape.layer_norm_eps, dtype=dtype)
        self._pad = pad

    def forward(self, packed: Packed) -> torch.Tensor:
        types = self.token_type_embeddings.weight[0]
        if packed.token_types is not None:
            types = self.token_type_embeddings(packed.token_types)
        x = self.word_embeddings(packed.input_ids) + types
        places = packed.positions if self._pad is None else packed.counts_excluding(self._pad) + self._pad
        x = x + self.position_embeddings(places)
        normed: torch.Tensor = self.LayerNorm(x)
        return normed


class _Layer(nn.Module):
    """Attention, then MLP; each is added to its input, and the sum is normalized."""

    def __init__(self, shape: BertShape, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.attention = _Attention(shape, number, dtype)
        self.intermediate = nn.ModuleDict({"dense": Linear(size, inner, bias=True, dtype=dtype)})
        self.output = _Output(inner, shape, dtype)
        self._activation = activation(shape.hidden_act)

    def forward(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        x = self.attention(x, packed)
        out: torch.Tensor = self.output(self._activation(self.intermediate["dense"](x)), x)
        return out


class _Attention(nn.Module):
    def __init__(self, shape: BertShape, number: int, dtype: torch.dtype) -> None:
        super().__init__()
        size = shape.hidden_size
        self._number = number
        self._heads = shape.num_attention_heads
        self._head_dim = size // self._heads
        self._params = AttentionParams(scale=self._head_dim**-0.5)
        parts = {name: Cut.all(size) for name in ("query", "key", "value")}
        self.self = nn.ModuleDict({"qkv": FusedLinear(size, parts, bias=True, dtype=dtype)})
        self.output = _Output(size, shape, dtype)

    def forward(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        q, k, v = self.self["qkv"](x).view(len(x), 3, self._heads, self._head_dim).unbind(1)
        seen = packed.attend(self._number, q, k, v, self._params)
        out: torch.Tensor = self.output(seen.flatten(1), x)
        return out


class _Output(nn.Module):
    """A projection to the hidden size, added to the residual and normalized."""

    def __init__(self, inputs: int, shape: BertShape, dtype: torch.dtype) -> None:
        super().__init__()
        self.dense = Linear(inputs, shape.hidden_size, bias=True, dtype=dtype)
        self.LayerNorm = LayerNorm(shape.hidden_size, shape.layer_norm_eps, dtype=dtype)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


def build(
    config: Mapping[str, Any], labels: Sequence[str], dtype: str, _longest: int | None, *, roberta: bool
) -> EncoderModel:
    """Build an encoder, or a classifier if there are labels."""
    shape = parse_shape(config, BertShape, FIELDS)
    kind = saved_torch_dtype(config, dtype)
    pad = shape.pad_token_id if roberta else None
    module: Bert | BertClassifier | RobertaClassifier
    if not labels:
        module = Bert(shape, kind, pad=pad)
    elif pad is None:
        module = BertClassifier(shape, len(labels), kind)
    else:
        module = RobertaClassifier(shape, len(labels), kind, pad=pad)
    return EncoderModel(
        module=module,
        scores=module.scores if isinstance(module, BertClassifier | RobertaClassifier) else None,
        context_length=shape.max_position_embeddings - (0 if pad is None else pad + 1),
        vocab_size=shape.vocab_size,
        token_types=shape.type_vocab_size,
        hidden_size=shape.hidden_size,
        labels=labels,
        dtype=kind,
    )


FAMILIES = (
    EncoderFamily(architectures=("BertModel",), build=partial(build, roberta=False)),
    EncoderFamily(
        architectures=("RobertaModel", "XLMRobertaModel", "CamembertModel"), build=partial(build, roberta=True)
    ),
)
