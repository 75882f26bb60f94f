"""GLM-4 of 2024: a bias on queries, keys and values. Checkpoints store gate and up as one.

Neighbours are rotated, in the first half of each head (`ModelConfig.rope`).
"""

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """GlmForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, input_bias=config.attention_bias)
        return DecoderLayer(config, attention, GatedMLP(config, shard))

    return CausalLM(config, shard, layer)
