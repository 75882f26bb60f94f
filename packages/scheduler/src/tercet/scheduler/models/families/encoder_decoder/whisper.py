"""Whisper: the decoder of transcripts, which attends to encoded audio."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from tercet.scheduler.models.audio import whisper
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import because, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, Decoder
from tercet.scheduler.models.layers.encoder_decoder.cross_attention import CrossAttention, UnrotatedAttention
from tercet.scheduler.models.layers.encoder_layers import LayerNorm, Table
from tercet.scheduler.models.layers.layer_ops import Batch, OpsModule
from tercet.scheduler.models.layers.layers import VocabParallelEmbedding
from tercet.scheduler.models.layers.linear import Linear
from tercet.scheduler.models.layers.shard import Shard

_EPS = 1e-5
"""Epsilon of all norms: that of torch."""
_DEFAULTS = {
    "vocab_size": 51_865,
    "d_model": 384,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "decoder_ffn_dim": 1536,
    "max_target_positions": 448,
}
_NAMES = {
    "d_model": "hidden_size",
    "decoder_layers": "num_hidden_layers",
    "decoder_attention_heads": "num_attention_heads",
    "decoder_ffn_dim": "intermediate_size",
    "max_target_positions": "max_position_embeddings",
}
"""Names of other families for the decoder's sizes."""


class SelfAttention(UnrotatedAttention):
    """Attention over the decoder's own tokens."""

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden]."""
        attended = batch.attend(self.layer_id, self.q_proj(x).view(self.heads), *self.keys_values(x), self.params)
        out: torch.Tensor = self.out_proj(attended.flatten(1))
        return out


class WhisperLayer(nn.Module):
    """Self-attention, cross-attention and MLP, each on the normalized residual."""

    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        super().__init__()
        size, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.self_attn = SelfAttention(config, layer_id)
        self.self_attn_layer_norm = LayerNorm(size, _EPS, dtype=dtype)
        self.encoder_attn = CrossAttention(config, layer_id)
        self.encoder_attn_layer_norm = LayerNorm(size, _EPS, dtype=dtype)
        self.fc1 = Linear(size, inner, bias=True, dtype=dtype)
        self.fc2 = Linear(inner, size, bias=True, dtype=dtype)
        self.final_layer_norm = LayerNorm(size, _EPS, dtype=dtype)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the output [tokens, hidden] of x [tokens, hidden]."""
        x = x + self.self_attn(self.self_attn_layer_norm(x), batch)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), batch)
        out: torch.Tensor = x + self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return out


class WhisperDecoder(Decoder):
    """Embeddings of tokens and positions, layers and the final norm."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        nn.Module.__init__(self)
        self.rotary = None
        self.embed_tokens = VocabParallelEmbedding(config, shard)
        self.embed_positions = Table(config.learned_positions, config.hidden_size, config.dtype)
        self.layers = nn.ModuleList(WhisperLayer(config, number) for number in range(config.layers))
        self.layer_norm = LayerNorm(config.hidden_size, _EPS, dtype=config.dtype)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the hidden states [tokens, hidden] of input ids [tokens] at positions [tokens]."""
        x: torch.Tensor = self.embed_tokens(input_ids) + self.embed_positions(positions)
        for layer in self.layers:
            x = layer(x, batch)
        hidden: torch.Tensor = self.layer_norm(x)
        return hidden


class WhisperForConditionalGeneration(CausalLM):
    """The decoder. Its head is the embedding."""

    def __init__(self, config: ModelConfig, shard: Shard) -> None:
        OpsModule.__init__(self)
        if not shard.is_whole:
            raise ValueError(f"{config.architecture} runs on one rank: its cross-attention is not split")
        self.config = config
        self.shard = shard
        self.model = WhisperDecoder(config, shard)
        self.lm_head = None


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    sizes = {_NAMES.get(name, name): config.get(name) or usual for name, usual in _DEFAULTS.items()}
    # `honoured_fields` has read transformers' aliases of the encoder's sizes
    return {**config, **sizes, "num_key_value_heads": sizes["num_attention_heads"], "head_dim": None}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    fields.choice("activation_function", ("gelu",), "gelu")
    if not config.tie_word_embeddings:
        raise wrong("tie_word_embeddings", "false is not supported: the head is the embedding")
    return replace(config, learned_positions=config.context_length)


FAMILIES = (
    ModelFamily(
        architectures=("WhisperForConditionalGeneration",),
        build=WhisperForConditionalGeneration,
        fields=field_table(
            "activation_function begin_suppress_tokens d_model decoder_attention_heads decoder_ffn_dim decoder_layers "
            "encoder_attention_heads encoder_ffn_dim encoder_layers is_encoder_decoder max_source_positions "
            "max_target_positions median_filter_width num_mel_bins suppress_tokens",
            without_effect=because(
                {
                    "of training": "activation_dropout apply_spec_augment decoder_layerdrop dropout encoder_layerdrop "
                    "mask_feature_length mask_feature_min_masks mask_feature_prob mask_time_length mask_time_min_masks "
                    "mask_time_prob",
                    "no model of transformers scales by it": "scale_embedding",
                    "of audio classifiers": "classifier_proj_size use_weighted_layer_sum",
                    "of tokens that the frontend or generation_config.json decides": "decoder_start_token_id",
                    "sizes of the encoder under other names": "num_attention_heads num_hidden_layers "
                    "num_key_value_heads hidden_size",
                }
            ),
        ),
        defaults=ConfigDefaults(tied=True),
        normalize=_normalize,
        audio=whisper.audio_model,
        adapt=_adapt,
        not_native="native kernels run no layers with cross-attention",
    ),
)
