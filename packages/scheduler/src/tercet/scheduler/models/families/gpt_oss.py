"""gpt-oss: a sink per head, windows in every other layer, experts with biases and a clamped gate (`MoeConfig`)."""

from tercet.scheduler.models.config.attention_windows import Windows, every_second_layer
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, NOT_READ, WINDOWS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build GptOssForCausalLM."""
    bias = config.attention_bias

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(config, number, rotary, shard, input_bias=bias, output_bias=bias, sinks=True)
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


FAMILIES = (
    ModelFamily(
        architectures=("GptOssForCausalLM",),
        build=build,
        fields=field_table(
            EXPERTS + WINDOWS + "attention_bias swiglu_alpha swiglu_limit", without_effect={"hidden_act": NOT_READ}
        ),
        defaults=ConfigDefaults(
            rms_norm_eps=1e-5,
            head_dim=64,
            attention_bias=("attention_bias", True),
            rope_theta=150_000.0,
            rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        ),
        windows=Windows(usual=128, pattern=every_second_layer),
        moe=MoeDefaults(experts=128, top_k=4, renormalizes=True, gate="clamped", bias=True),
    ),
)
