"""Mistral: no biases; its sliding window is in the config (`ModelConfig.windows`)."""

from tercet.scheduler.executor.model_config import ModelConfig
from tercet.scheduler.models.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """MistralForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, number, rotary, shard), GatedMLP(config, shard))

    return CausalLM(config, layer)
