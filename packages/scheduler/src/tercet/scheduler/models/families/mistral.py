"""Mistral and Mixtral: no biases; the sliding window is in the config (`ModelConfig.windows`)."""

from tercet.scheduler.models.config.attention_windows import Windows, all_layers
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, WINDOWS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build MistralForCausalLM or MixtralForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, number, rotary, shard), mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


FAMILIES = (
    ModelFamily(
        architectures=("MistralForCausalLM", "MistralModel"),
        build=build,
        fields=field_table(WINDOWS),
        windows=Windows(usual=4096, pattern=all_layers),
    ),
    ModelFamily(
        architectures=("MixtralForCausalLM", "MixtralModel"),
        build=build,
        fields=field_table(EXPERTS + "sliding_window"),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, rope_theta=1e6),
        windows=Windows(),
        moe=MoeDefaults(experts=8, top_k=2, renormalizes=True),
    ),
)
