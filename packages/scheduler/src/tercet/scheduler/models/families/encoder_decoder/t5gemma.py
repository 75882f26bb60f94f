"""T5Gemma: an encoder and a decoder of Gemma 2's layers; those of the decoder attend to the encoder's output, too."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tercet.kernels.ops.rope import apply_rope
from tercet.scheduler.models.config.attention_windows import Windows, every_second_layer
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.config_parser import parse_family_config
from tercet.scheduler.models.config.family_config import FamilyConfig
from tercet.scheduler.models.config.field_support import NOT_READ, because, field_table, honoured_fields
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.start_tokens import start_tokens
from tercet.scheduler.models.families.gemma.gemma import cap, with_defaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, Decoder
from tercet.scheduler.models.layers.encoder_decoder.cross_attention import GroupedCrossAttention
from tercet.scheduler.models.layers.encoder_decoder.text_encoder import attend_to_all, by_rows
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary, VocabParallelEmbedding
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.norms import CenteredNorm
from tercet.scheduler.models.layers.parameters import rounded
from tercet.scheduler.models.layers.shard import Shard


def _norm(config: ModelConfig) -> CenteredNorm:
    return CenteredNorm(config.hidden_size, config.rms_norm_eps, config.dtype)


class _Layer(nn.Module):
    """Self-attention and MLP, with norms of their inputs and outputs."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: Rotary, shard: Shard) -> None:
        super().__init__()
        bias = config.attention_bias
        self.self_attn = Attention(config, layer_id, rotary, shard, input_bias=bias, output_bias=bias)
        self.pre_self_attn_layernorm, self.post_self_attn_layernorm = _norm(config), _norm(config)
        self.mlp = GatedMLP(config, shard, gate="gelu_tanh")
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = _norm(config), _norm(config)

    def add_mlp(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [tokens, hidden] plus the MLP of it."""
        out, _ = self.mlp(self.pre_feedforward_layernorm, x, None, self.post_feedforward_layernorm)
        total: torch.Tensor = x + out
        return total


class T5GemmaEncoderLayer(_Layer):
    """Self-attention over a whole text, and MLP."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: Rotary, shard: Shard) -> None:
        super().__init__(config, layer_id, rotary, shard)
        self._size, self._inner = config.hidden_size, config.intermediate_size

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden]."""
        attention = self.self_attn
        sizes, width = attention.sizes, sum(attention.sizes)
        qkv = by_rows(self._project, x, 2 * self._size * width)
        q, k, v = (part.view(len(x), -1, attention.head_dim) for part in qkv.split_with_sizes(sizes, 1))
        q, k = apply_rope(q, k, positions, attention.rotary.cache)
        seen = attend_to_all(q, k, v, attention.params).flatten(1)
        x = x + by_rows(self._project_back, seen, 2 * self._size * sizes[0])
        return by_rows(self.add_mlp, x, 6 * self._size * self._inner)

    def _project(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.self_attn.qkv_proj(self.pre_self_attn_layernorm(x))
        return out

    def _project_back(self, seen: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.post_self_attn_layernorm(self.self_attn.o_proj(seen))
        return out


class T5GemmaEncoder(nn.Module):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        super().__init__()
        rotary = Rotary(config)
        self.embed_tokens = VocabParallelEmbedding(config, shard)
        self.layers = nn.ModuleList(
            T5GemmaEncoderLayer(config, number, rotary, shard) for number in range(config.layers)
        )
        self.norm = _norm(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return hidden states [tokens, hidden] of token ids [tokens]."""
        x: torch.Tensor = self.embed_tokens(ids)
        positions = torch.arange(len(ids), device=ids.device)
        for layer in self.layers:
            x = layer(x, positions)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class T5GemmaDecoderLayer(_Layer):
    """Self-attention, cross-attention and MLP."""

    def __init__(self, config: ModelConfig, layer_id: int, rotary: Rotary, shard: Shard, inputs: int) -> None:
        super().__init__(config, layer_id, rotary, shard)
        self.cross_attn = GroupedCrossAttention(config, layer_id, inputs)
        self.pre_cross_attn_layernorm, self.post_cross_attn_layernorm = _norm(config), _norm(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden]."""
        norms = self.pre_self_attn_layernorm, self.post_self_attn_layernorm
        x = x + self.self_attn(norms[0], x, None, positions, batch, norms[1])[0]
        x = x + self.post_cross_attn_layernorm(self.cross_attn(self.pre_cross_attn_layernorm(x), batch))
        return self.add_mlp(x)


class T5GemmaDecoder(Decoder):
    """Embeddings, layers and the final norm."""

    def __init__(self, config: ModelConfig, shard: Shard, inputs: int) -> None:
        nn.Module.__init__(self)
        self.rotary = rotary = Rotary(config)
        self.embed_tokens = VocabParallelEmbedding(config, shard)
        self.layers = nn.ModuleList(
            T5GemmaDecoderLayer(config, number, rotary, shard, inputs) for number in range(config.layers)
        )
        self.norm = _norm(config)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens] at positions [tokens]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x, positions, batch)
        hidden: torch.Tensor = self.norm(x)
        return hidden


class T5GemmaForConditionalGeneration(CausalLM):
    """The decoder with its head, and the encoder."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        OpsModule.__init__(self)
        if not shard.is_whole:
            raise ValueError(f"{config.architecture} runs on one rank: its cross-attention is not split")
        if config.encoder is None:
            raise TypeError("the config has no encoder")
        encoder = _with_rounded_scale(config.encoder)
        self.config = config = _with_rounded_scale(config)
        self.shard = shard
        self.model = T5GemmaDecoder(config, shard, encoder.hidden_size)
        self.encoder = T5GemmaEncoder(encoder, shard)
        size, dtype = config.hidden_size, config.dtype
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(size, config.vocab_size, bias=False, dtype=dtype)


def _with_rounded_scale(config: ModelConfig) -> ModelConfig:
    return replace(config, embedding_scale=rounded(config.embedding_scale, config.dtype))


_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
"""transformers' defaults of encoder and decoder."""
_FIELDS = field_table(
    "attention_bias attn_logit_softcapping decoder encoder final_logit_softcapping hidden_activation "
    "is_encoder_decoder layer_types query_pre_attn_scalar sliding_window",
    without_effect=because(
        {
            "transformers sets it": "cross_attention_hidden_size is_decoder",
            "of training": "classifier_dropout_rate dropout_rate",
            "of tokens that `start_tokens` reads": "decoder_start_token_id forced_bos_token_id",
            NOT_READ: "hidden_act",
        }
    ),
)
"""Fields of the model, and of encoder and decoder, each of which has a config within."""
_WINDOWS = Windows(usual=4096, pattern=every_second_layer)  # `with_defaults` has set `layer_types`


def _half(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the config of the encoder or the decoder in the format of other families."""
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise wrong(name, "is not an object")
    return with_defaults(honoured_fields(given, _FIELDS), _DEFAULTS, lambda _: 2)


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    own = {name: config[name] for name in ("architectures", "dtype", "torch_dtype", "eos_token_id") if name in config}
    tied = config.get("tie_word_embeddings")
    own |= {"tie_word_embeddings": True if tied is None else tied}
    return {**_half(config, "decoder"), **own, "encoder_config": {**_half(config, "encoder"), **own}}


def _adapt_half(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(
        config,
        embedding_scale=config.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        softcap=cap(fields, "attn_logit_softcapping"),
        logit_softcap=cap(fields, "final_logit_softcapping"),
    )


_ENCODER = FamilyConfig(fields=_FIELDS, windows=_WINDOWS, adapt=_adapt_half)


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    encoder = parse_family_config(
        _ENCODER, fields.values["encoder_config"], {}, str(config.dtype).removeprefix("torch.")
    )
    if encoder.vocab_size != config.vocab_size:
        raise wrong("encoder.vocab_size", f"{encoder.vocab_size} is not the decoder's {config.vocab_size}")
    return replace(_adapt_half(config, fields), encoder=encoder)


FAMILIES = (
    ModelFamily(
        architectures=("T5GemmaForConditionalGeneration",),
        build=T5GemmaForConditionalGeneration,
        fields=_FIELDS,
        windows=_WINDOWS,
        normalize=_normalize,
        start=start_tokens,
        adapt=_adapt,
        not_native="native kernels run no layers with cross-attention",
    ),
)
