"""BART and mBART: an encoder of text, and a decoder that attends to its output. mBART normalizes inputs of layers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import because, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.start_tokens import start_tokens
from tercet.scheduler.models.families.encoder_decoder.whisper import SelfAttention
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, Decoder
from tercet.scheduler.models.layers.encoder_decoder.cross_attention import CrossAttention, UnrotatedAttention
from tercet.scheduler.models.layers.encoder_decoder.text_encoder import attend_to_all, by_rows
from tercet.scheduler.models.layers.encoder_layers import ACTIVATIONS, LayerNorm, Table
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers.layers import VocabParallelEmbedding
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.shard import Shard

_EPS = 1e-5
"""Epsilon of all norms: that of torch."""
_OFFSET = 2
"""Rows of the tables of positions before the first position."""
_DEFAULTS = {
    "vocab_size": 50_265,
    "d_model": 1024,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
}
_NAMES = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
}
"""Names of other families for the decoder's sizes."""
_Compute = Callable[[torch.Tensor], torch.Tensor]


class _Layer(nn.Module):
    """Attention and MLP, each with a residual, and a norm of the sum or, if `first`, of the input."""

    def __init__(self, config: ModelConfig, attention: UnrotatedAttention, *, first: bool) -> None:
        super().__init__()
        size, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.self_attn = attention
        self.self_attn_layer_norm = LayerNorm(size, _EPS, dtype=dtype)
        self.fc1 = Linear(size, inner, bias=True, dtype=dtype)
        self.fc2 = Linear(inner, size, bias=True, dtype=dtype)
        self.final_layer_norm = LayerNorm(size, _EPS, dtype=dtype)
        self._activation = ACTIVATIONS[config.activation]
        self._first = first

    def add(self, x: torch.Tensor, norm: LayerNorm, compute: _Compute) -> torch.Tensor:
        """Return x plus what is computed of it, with the norm in its place."""
        out: torch.Tensor = x + compute(norm(x)) if self._first else norm(x + compute(x))
        return out

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(self._activation(self.fc1(x)))
        return out


class BartEncoderLayer(_Layer):
    """Self-attention over a whole text, and MLP."""

    def __init__(self, config: ModelConfig, layer_id: int, *, first: bool) -> None:
        super().__init__(config, UnrotatedAttention(config, layer_id, key_bias=True), first=first)
        self._size, self._inner = config.hidden_size, config.intermediate_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden]."""
        x = self.add(x, self.self_attn_layer_norm, self._attend)
        return self.add(x, self.final_layer_norm, lambda y: by_rows(self.mlp, y, 4 * self._size * self._inner))

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        attention, operations = self.self_attn, 2 * self._size**2
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        q, k, v = (by_rows(each, x, operations).view(attention.heads) for each in projections)
        return by_rows(attention.out_proj, attend_to_all(q, k, v, attention.params).flatten(1), operations)


class BartEncoder(nn.Module):
    """Embeddings of tokens, which are the decoder's, and of positions, then layers."""

    def __init__(self, config: ModelConfig, tokens: VocabParallelEmbedding, *, first: bool) -> None:
        super().__init__()
        size, dtype = config.hidden_size, config.dtype
        self._embed_tokens = (tokens,)  # in a tuple, or its weight would have two names
        self.embed_positions = Table(config.learned_positions, size, dtype)
        self.layernorm_embedding = LayerNorm(size, _EPS, dtype=dtype)
        self.layers = nn.ModuleList(BartEncoderLayer(config, number, first=first) for number in range(config.layers))
        self.layer_norm = LayerNorm(size, _EPS, dtype=dtype) if first else nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [tokens, hidden] of token ids [tokens]."""
        places = torch.arange(_OFFSET, _OFFSET + len(ids), device=ids.device)
        x = self.layernorm_embedding(self._embed_tokens[0](ids) + self.embed_positions(places))
        for layer in self.layers:
            x = layer(x)
        hidden: torch.Tensor = self.layer_norm(x)
        return hidden


class BartDecoderLayer(_Layer):
    """Self-attention, cross-attention and MLP."""

    def __init__(self, config: ModelConfig, layer_id: int, *, first: bool) -> None:
        super().__init__(config, SelfAttention(config, layer_id, key_bias=True), first=first)
        self.encoder_attn = CrossAttention(config, layer_id, key_bias=True)
        self.encoder_attn_layer_norm = LayerNorm(config.hidden_size, _EPS, dtype=config.dtype)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden]."""
        x = self.add(x, self.self_attn_layer_norm, partial(self.self_attn, batch=batch))
        x = self.add(x, self.encoder_attn_layer_norm, partial(self.encoder_attn, batch=batch))
        return self.add(x, self.final_layer_norm, self.mlp)


class BartDecoder(Decoder):
    """Embeddings of tokens and positions, then layers."""

    def __init__(self, config: ModelConfig, shard: Shard, *, first: bool) -> None:
        nn.Module.__init__(self)
        self.rotary = None
        self.embed_tokens = VocabParallelEmbedding(config, shard)
        self.embed_positions = Table(config.learned_positions, config.hidden_size, config.dtype)
        self.layernorm_embedding = LayerNorm(config.hidden_size, _EPS, dtype=config.dtype)
        self.layers = nn.ModuleList(BartDecoderLayer(config, number, first=first) for number in range(config.layers))
        self.layer_norm = LayerNorm(config.hidden_size, _EPS, dtype=config.dtype) if first else nn.Identity()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens] at positions [tokens]."""
        x = self.layernorm_embedding(self.embed_tokens(input_ids) + self.embed_positions(positions + _OFFSET))
        for layer in self.layers:
            x = layer(x, batch)
        hidden: torch.Tensor = self.layer_norm(x)
        return hidden


class BartForConditionalGeneration(CausalLM):
    """The decoder, whose head is the embedding, and the encoder."""

    def __init__(self, config: ModelConfig, shard: Shard, *, first: bool) -> None:
        OpsModule.__init__(self)
        if not shard.is_whole:
            raise ValueError(f"{config.architecture} runs on one rank: its cross-attention is not split")
        if config.encoder is None:
            raise TypeError("the config has no encoder")
        self.config = config
        self.shard = shard
        self.model = BartDecoder(config, shard, first=first)
        self.encoder = BartEncoder(config.encoder, self.model.embed_tokens, first=first)
        self.lm_head = None
        bias = torch.zeros(1, config.vocab_size, dtype=config.dtype)
        self.final_logits_bias = nn.Parameter(bias, requires_grad=False)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.compute_logits`. A bias is added."""
        return super().compute_logits(hidden).add_(self.final_logits_bias)


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = {_NAMES.get(name, name): config.get(name) or usual for name, usual in _DEFAULTS.items()}
    # `honoured_fields` has read transformers' aliases of the encoder's sizes
    return {**config, **sizes, "num_key_value_heads": sizes["num_attention_heads"], "head_dim": None}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    if not config.tie_word_embeddings:
        raise wrong("tie_word_embeddings", "false is not supported: the head is the embedding")
    heads = fields.count("encoder_attention_heads", 16)
    if config.hidden_size % heads or config.hidden_size % config.heads:
        raise wrong("encoder_attention_heads", f"{heads} and {config.heads} must divide d_model {config.hidden_size}")
    decoder = replace(
        config,
        activation=fields.choice("activation_function", tuple(ACTIVATIONS), "gelu"),
        learned_positions=config.context_length + _OFFSET,
        embedding_scale=math.sqrt(config.hidden_size) if fields.flag("scale_embedding") else 1.0,
    )
    layers = fields.count("encoder_layers", 12)
    encoder = replace(
        decoder,
        layers=layers,
        windows=(0,) * layers,
        heads=heads,
        kv_heads=heads,
        head_dim=config.hidden_size // heads,
        intermediate_size=fields.count("encoder_ffn_dim", 4096),
    )
    return replace(decoder, encoder=encoder)


_FIELDS = field_table(
    "activation_function d_model decoder_attention_heads decoder_ffn_dim decoder_layers encoder_attention_heads "
    "encoder_ffn_dim encoder_layers is_encoder_decoder scale_embedding",
    without_effect=because(
        {
            "of training": "activation_dropout decoder_layerdrop dropout encoder_layerdrop",
            "of tokens that `start_tokens` reads, also from generation_config.json": "decoder_start_token_id "
            "forced_bos_token_id",
            "`start_tokens` says that it is not applied": "early_stopping forced_eos_token_id length_penalty "
            "max_length min_length no_repeat_ngram_size num_beams",
            "of decoders without an encoder, which are another architecture": "is_decoder",
            "sizes of the encoder under other names": "num_attention_heads num_hidden_layers num_key_value_heads "
            "hidden_size",
        }
    ),
)


def _family(architecture: str, *, first: bool) -> ModelFamily:
    return ModelFamily(
        architectures=(architecture,),
        build=partial(BartForConditionalGeneration, first=first),
        fields=_FIELDS,
        defaults=ConfigDefaults(tied=True),
        normalize=_normalize,
        start=start_tokens,
        adapt=_adapt,
        not_native="native kernels run no layers with cross-attention",
    )


FAMILIES = (
    _family("BartForConditionalGeneration", first=False),
    _family("MBartForConditionalGeneration", first=True),
)
