"""Phi-3, Phi-3.5 and Phi-4: no biases. Checkpoints store queries, keys and values fused, and gate and up."""

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Phi3ForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, number, rotary, shard), GatedMLP(config, shard))

    return CausalLM(config, shard, layer)
