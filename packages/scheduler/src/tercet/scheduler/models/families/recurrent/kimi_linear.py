"""Kimi-Linear: Kimi Delta Attention, layers of latent attention without rotation between, and experts."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import DEEPSEEK_EXPERTS, NOT_READ, Refused, field_table
from tercet.scheduler.models.config.latent_config import LatentDefaults
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults
from tercet.scheduler.models.config.recurrent_config import DeltaNetConfig, parse_kimi_delta
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, build_hybrid
from tercet.scheduler.models.layers.delta_net import KimiDeltaAttention
from tercet.scheduler.models.layers.latent_attention import LatentAttention
from tercet.scheduler.models.layers.layers import Rotary, Unrotated
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build KimiLinearForCausalLM."""
    latent, unrotated = config.latent, Unrotated(config)
    if latent is None:
        raise ValueError(f"{config.architecture} has latent attention")

    def attention(number: int, _: Rotary) -> LatentAttention:
        return LatentAttention(config, latent, number, unrotated, shard)

    return build_hybrid(config, shard, DeltaNetConfig, partial(KimiDeltaAttention, config), attention)


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the fields of published configs, in which layers have numbers from 1."""
    linear = config.get("linear_attn_config")
    if linear is None:
        return config
    if not isinstance(linear, Mapping):
        raise wrong("linear_attn_config", "is not an object")
    names = {
        "head_dim": "linear_head_dim",
        "num_heads": "linear_num_heads",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    result = {**config, **{names[name]: value for name, value in linear.items() if name in names}}
    lists = Fields(linear, "linear_attn_config.")
    full, kda = lists.layer_list("full_attn_layers"), lists.layer_list("kda_layers")
    if config.get("layer_types") is None and full is not None and kda is not None:
        kinds = {**dict.fromkeys(full, "full_attention"), **dict.fromkeys(kda, "linear_attention")}
        result["layer_types"] = [kinds.get(layer) for layer in range(1, Fields(config).layers() + 1)]
    return result


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    net = parse_kimi_delta(fields, config.layers)
    return replace(config, recurrent=net, unrotated=frozenset(range(config.layers)) - net.layers)


FAMILIES = (
    ModelFamily(
        architectures=("KimiLinearForCausalLM",),
        build=build,
        fields=field_table(
            DEEPSEEK_EXPERTS
            + "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim layer_types linear_attn_config "
            "linear_conv_kernel_dim linear_head_dim linear_num_heads mlp_layer_types",
            without_effect={
                "head_dim": NOT_READ,
                "qk_head_dim": "the sum of two others",
                "tie_word_embeddings": "transformers never ties the head",
                **dict.fromkeys(
                    ("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta"), "no layer rotates"
                ),
            },
            refused={
                "mla_use_nope": Refused((True,), "layers of attention do not rotate"),
                "use_grouped_topk": Refused((True,), "routers choose among groups of experts"),
            },
            aliases={
                "model_max_length": "max_position_embeddings",
                "moe_renormalize": "norm_topk_prob",
                "moe_router_activation_func": "scoring_func",
                "num_expert_group": "n_group",
                "num_experts": "n_routed_experts",
                "num_experts_per_token": "num_experts_per_tok",
                "num_local_experts": "n_routed_experts",
                "num_shared_experts": "n_shared_experts",
            },
            ships_own_code=True,
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5),
        moe=DeepSeekMoeDefaults(experts=256, top_k=8, size=1024, shared=1, dense=1, renormalizes=True, scale=2.446),
        latent=LatentDefaults(query_rank=0, interleaved=False),
        normalize=_normalize,
        adapt=_adapt,
    ),
)
