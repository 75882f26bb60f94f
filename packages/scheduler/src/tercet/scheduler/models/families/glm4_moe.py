"""GLM-4.5 and later: experts after the first layers, half of each head rotated, norms of heads in some models."""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import DEEPSEEK_EXPERTS, ROUTED, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Glm4MoeForCausalLM."""

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = Attention(
            config,
            number,
            rotary,
            shard,
            input_bias=config.attention_bias,
            qk_norm="heads" if config.norms_heads else "none",
        )
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


FAMILIES = (
    ModelFamily(
        architectures=("Glm4MoeForCausalLM",),
        build=build,
        fields=field_table(
            DEEPSEEK_EXPERTS + "use_qk_norm num_nextn_predict_layers",
            aliases={**ROUTED, "num_mtp_layers": "num_nextn_predict_layers"},
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, rotated_share=0.5, mtp_layers=1),
        moe=DeepSeekMoeDefaults(experts=128, top_k=8, size=1408, shared=1, dense=1, renormalizes=True),
    ),
)
