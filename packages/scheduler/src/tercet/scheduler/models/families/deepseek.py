"""DeepSeek-V2, V3, R1, Kimi K2, GLM-4.7-Flash and Mistral 4: latent attention, experts in all but the first layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
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
from tercet.scheduler.models.vision import wrappers


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build the model of any architecture of this file."""
    latent = config.latent
    if latent is None:
        raise ValueError(f"{config.architecture} has latent attention")

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        attention = LatentAttention(config, latent, number, rotary, shard)
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


_MISTRAL4 = {
    "kv_lora_rank": 256,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
"""transformers' defaults that differ from those of the other families."""


def _normalize_mistral4(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config without head_dim and partial_rotary_factor, which qk_rope_head_dim replaces."""
    said = {name: value for name, value in config.items() if value is not None or name == "q_lora_rank"}
    plain = {name: value for name, value in {**_MISTRAL4, **said}.items() if name != "head_dim"}
    rope = plain["rope_parameters"]
    if isinstance(rope, Mapping):
        fields = Fields(plain)
        rotated = fields.count("qk_rope_head_dim", 64)
        whole = rotated + fields.count("qk_nope_head_dim", 64)
        share = Fields(rope, "rope_parameters.").number("partial_rotary_factor", rotated / whole)
        if int(Fields(said).count("head_dim", whole) * share) != rotated:
            raise wrong("head_dim", f"with partial_rotary_factor it must give the {rotated} of qk_rope_head_dim")
        plain["rope_parameters"] = {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
    return plain


def _adapt_mistral4(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Return the config with group-limited routing, also for one group, and with routed_scaling_factor."""
    if config.moe is None:
        return config
    groups, best = fields.count("n_group", 1), fields.count("topk_group", 1)
    each = config.moe.experts // groups
    if config.moe.experts % groups or best > groups or each < 2 or config.moe.routing.top_k > best * each:
        raise wrong("n_group", f"{config.moe.experts} experts cannot form {groups} groups of which {best} are chosen")
    scale = fields.number("routed_scaling_factor", 1.0)
    routing = replace(config.moe.routing, groups=groups, top_groups=best, group_best=2, scale=scale)
    return replace(config, moe=replace(config.moe, routing=routing, float32_router=False))


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
    ModelFamily(
        architectures=("Mistral4ForCausalLM",),
        build=build,
        fields=field_table(
            "attention_bias first_k_dense_replace kv_lora_rank moe_intermediate_size n_group n_routed_experts "
            "n_shared_experts norm_topk_prob num_experts_per_tok q_lora_rank qk_nope_head_dim qk_rope_head_dim "
            "rope_interleave routed_scaling_factor topk_group v_head_dim",
            aliases=ROUTED,
        ),
        defaults=ConfigDefaults(scales_queries=True),
        normalize=_normalize_mistral4,
        adapt=_adapt_mistral4,
        moe=DeepSeekMoeDefaults(experts=128, top_k=4, size=2048, shared=1, dense=0, renormalizes=True, score="softmax"),
        latent=LatentDefaults(query_rank=1024, nope_dim=64),
        images=wrappers.image_model,
    ),
)
