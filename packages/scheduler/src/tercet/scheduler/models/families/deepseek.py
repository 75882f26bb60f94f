"""DeepSeek-V2, V3, R1, Kimi K2 and GLM-4.7-Flash: latent attention, and experts in all but the first layers."""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import DEEPSEEK_EXPERTS, NOT_READ, ROUTED, field_table
from tercet.scheduler.models.config.latent_config import LatentDefaults
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.latent_attention import LatentAttention
from tercet.scheduler.models.layers.layers import Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build DeepseekV2ForCausalLM, DeepseekV3ForCausalLM or Glm4MoeLiteForCausalLM."""
    latent = config.latent
    if latent is None:
        raise ValueError(f"{config.architecture} has latent attention")

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = LatentAttention(config, latent, number, rotary, shard)
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


_LATENT = DEEPSEEK_EXPERTS + "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
_MTP = {**ROUTED, "num_mtp_layers": "num_nextn_predict_layers"}
FAMILIES = (
    ModelFamily(
        architectures=("DeepseekV2ForCausalLM",),
        build=build,
        fields=field_table(
            _LATENT + "mlp_bias",
            without_effect={"head_dim": NOT_READ},
            aliases={"num_experts": "n_routed_experts"},
            ships_own_code=True,
        ),
        moe=DeepSeekMoeDefaults(
            experts=64, top_k=None, size=1407, shared=2, dense=0, renormalizes=False, score="softmax"
        ),
        latent=LatentDefaults(interleaved=None),
    ),
    ModelFamily(
        architectures=("DeepseekV3ForCausalLM",),
        build=build,
        fields=field_table(_LATENT + "rope_interleave num_nextn_predict_layers", aliases=_MTP, ships_own_code=True),
        defaults=ConfigDefaults(mtp_layers=1),
        moe=DeepSeekMoeDefaults(
            experts=256, top_k=8, size=2048, shared=1, dense=3, renormalizes=True, scale=2.5, groups=(8, 4)
        ),
        latent=LatentDefaults(),
    ),
    ModelFamily(
        architectures=("Glm4MoeLiteForCausalLM",),
        build=build,
        fields=field_table(_LATENT + "rope_interleave mlp_layer_types num_nextn_predict_layers", aliases=_MTP),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, mtp_layers=1),
        moe=DeepSeekMoeDefaults(experts=64, top_k=4, size=1536, shared=1, dense=1, renormalizes=True, scale=1.8),
        latent=LatentDefaults(query_rank=768, nope_dim=192, value_dim=256),
    ),
)
