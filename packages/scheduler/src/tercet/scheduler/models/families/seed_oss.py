"""Seed-OSS: Llama with biases of queries, keys and values, and of the output if the config has them."""

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build SeedOssForCausalLM."""
    inputs, output = config.attention_bias, config.output_bias

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, input_bias=inputs, output_bias=output)
        return DecoderLayer(config, attention, GatedMLP(config, shard, bias=config.mlp_bias))

    return CausalLM(config, shard, layer)
