"""GLM-4.5 and later: experts after the first layers, half of each head rotated, norms of heads in some models."""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import DEEPSEEK_EXPERTS, ROUTED, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, build_decoder
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Glm4MoeForCausalLM."""
    return build_decoder(config, shard, qk_norm="heads" if config.norms_heads else "none")


FAMILIES = (
    ModelFamily(
        architectures=("Glm4MoeForCausalLM",),
        build=build,
        fields=field_table(
            DEEPSEEK_EXPERTS + "use_qk_norm num_nextn_predict_layers",
            aliases={**ROUTED, "num_mtp_layers": "num_nextn_predict_layers"},
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, output_bias=None, rotated_share=0.5, mtp_layers=1),
        moe=DeepSeekMoeDefaults(experts=128, top_k=8, size=1408, shared=1, dense=1, renormalizes=True),
    ),
)
