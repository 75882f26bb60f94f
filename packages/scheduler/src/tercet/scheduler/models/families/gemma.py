"""Gemma 2 and 3, and the text model of multimodal Gemma 3: norms before and after attention and MLP."""

from dataclasses import replace

import torch

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer, Norms
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.norms import CenteredNorm
from tercet.scheduler.models.layers.shard import Shard


class GemmaLayer(DecoderLayer):
    """Attention, then MLP, each on the normalized residual, with normalized outputs."""

    def __init__(self, config: ModelConfig, attention: Attention, mlp: GatedMLP) -> None:
        super().__init__(config, attention, mlp, CenteredNorm)
        self.pre_feedforward_layernorm = CenteredNorm(config.hidden_size, config.rms_norm_eps, config.dtype)
        self.post_feedforward_layernorm = CenteredNorm(config.hidden_size, config.rms_norm_eps, config.dtype)

    @property
    def norms(self) -> Norms:
        """The norms. In checkpoints, the norm after attention has the name that other families give to the one
        before the MLP.
        """
        return Norms(
            self.input_layernorm,
            self.pre_feedforward_layernorm,
            self.post_attention_layernorm,
            self.post_feedforward_layernorm,
        )


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Gemma2ForCausalLM, Gemma3ForCausalLM or Gemma3ForConditionalGeneration."""
    scale = torch.tensor(config.embedding_scale, dtype=config.dtype, device="cpu")  # rounded as in transformers
    config = replace(config, embedding_scale=float(scale))
    local = None if config.local_rope is None else Rotary(config, config.local_rope)
    older = config.architecture == "Gemma2ForCausalLM"

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(
            config,
            number,
            local if local is not None and config.window_of(number) else rotary,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.attention_bias,
            qk_norm="none" if older else "heads",
            norm=CenteredNorm,
        )
        return GemmaLayer(config, attention, GatedMLP(config, shard, gate="gelu_tanh"))

    return CausalLM(config, shard, layer, CenteredNorm)
