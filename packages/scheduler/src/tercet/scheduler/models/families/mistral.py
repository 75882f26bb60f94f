"""Mistral and Mixtral: no biases; the sliding window is in the config (`ModelConfig.windows`)."""

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build MistralForCausalLM or MixtralForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, number, rotary, shard), mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)
