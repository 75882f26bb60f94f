"""Qwen2 and Qwen2.5: a bias on queries, keys and values, whatever the config says of it, and none on the output."""

from tercet.scheduler.executor.model_config import ModelConfig
from tercet.scheduler.models.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Qwen2ForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, input_bias=True)
        return DecoderLayer(config, attention, GatedMLP(config, shard))

    return CausalLM(config, layer)
