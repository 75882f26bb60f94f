"""Llama 2, 3 and 3.1, ERNIE 4.5 and Granite: biases if the config has them."""

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build LlamaForCausalLM, Ernie4_5ForCausalLM or GraniteForCausalLM."""
    bias = config.attention_bias

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, input_bias=bias, output_bias=bias)
        return DecoderLayer(config, attention, GatedMLP(config, shard, bias=config.mlp_bias))

    return CausalLM(config, shard, layer)
