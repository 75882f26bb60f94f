"""SmolLM3: Llama with some layers without rotary embedding (`ModelConfig.unrotated`)."""

from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, GatedMLP, Rotary
from tercet.scheduler.models.layers.rotation import identity_table
from tercet.scheduler.models.layers.shard import Shard


class Unrotated(Rotary):
    """The table of layers without rotary embedding: an identity rotation, so that kernels have one kind of layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.cache = identity_table(self.cache)


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build SmolLM3ForCausalLM."""
    bias, unrotated = config.attention_bias, Unrotated(config)

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        table = unrotated if number in config.unrotated else rotary
        attention = Attention(config, number, table, shard, input_bias=bias, output_bias=bias)
        return DecoderLayer(config, attention, GatedMLP(config, shard, bias=config.mlp_bias))

    return CausalLM(config, shard, layer)
