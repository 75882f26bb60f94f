"""Seed-OSS: Llama with biases of queries, keys and values, and of the output if the config has them."""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import BIASES, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.family import ModelFamily
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


FAMILIES = (
    ModelFamily(
        architectures=("SeedOssForCausalLM", "SeedOssModel"),
        build=build,
        fields=field_table(BIASES + "attention_out_bias", ships_own_code=True),
        defaults=ConfigDefaults(head_dim=128, attention_bias=("attention_bias", True)),
        pad_token_id=1,
    ),
)
