"""Qwen3: each head's queries and keys are normalised before they are rotated."""

from tercet.scheduler.executor.model_config import ModelConfig
from tercet.scheduler.models.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Qwen3ForCausalLM."""
    bias = config.attention_bias

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, input_bias=bias, output_bias=bias, qk_norm=True)
        return DecoderLayer(config, attention, GatedMLP(config, shard))

    return CausalLM(config, layer)
