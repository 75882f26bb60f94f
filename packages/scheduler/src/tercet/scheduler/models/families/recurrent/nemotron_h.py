"""Nemotron-H and Nemotron 3: layers of Mamba 2, of attention, of an MLP or of experts, one after the other."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.protocol.json_files import INFINITY
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import NOT_READ, ROUTED, Refused, because, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults
from tercet.scheduler.models.config.recurrent_config import ATTENTION_KINDS, MAMBA_KINDS, Mamba2Config, parse_mamba2
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, SingleLayer, states_of
from tercet.scheduler.models.layers.layers import Attention, Rotary, SquaredReLUMLP
from tercet.scheduler.models.layers.mamba2 import Mamba2
from tercet.scheduler.models.layers.moe import MixtureOfExperts
from tercet.scheduler.models.layers.shard import Shard

_KINDS = {"M": MAMBA_KINDS[1], "*": ATTENTION_KINDS[1], "-": "mlp", "E": "moe"}
"""Kinds of layers by their letters in `hybrid_override_pattern`."""
_DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 8,
    "moe_shared_expert_intermediate_size": 7688,
}
"""transformers' defaults of absent fields."""


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build NemotronHForCausalLM."""
    mamba = states_of(config, Mamba2Config)

    def layer(number: int, rotary: Rotary) -> SingleLayer:
        if number in mamba.layers:
            return SingleLayer(config, Mamba2(config, number, mamba, shard))
        if number in config.cached_layers:
            return SingleLayer(config, Attention(config, number, rotary, shard))
        if config.moe is not None and config.moe.layers[number]:
            return SingleLayer(config, MixtureOfExperts(config, config.moe, shard, number))
        return SingleLayer(config, SquaredReLUMLP(config, shard, bias=config.mlp_bias))

    return CausalLM(config, shard, layer)


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Name the kind of each layer, and those with experts as DeepSeek does."""
    kinds, pattern = config.get("layer_types"), config.get("hybrid_override_pattern")
    if kinds is None:
        kinds = _kinds_of(pattern if pattern is not None else "ME*-")
    if not isinstance(kinds, list):
        raise wrong("layers_block_type", "is not a list")
    return {
        **_DEFAULTS,
        **config,
        "mamba_proj_bias": config.get("use_bias"),
        "time_step_limit": [config.get("time_step_min", 0.001), INFINITY],
        "layer_types": kinds,
        "num_hidden_layers": len(kinds),
        "mlp_layer_types": ["sparse" if kind == "moe" else "dense" for kind in kinds],
    }


def _kinds_of(pattern: object) -> list[str]:
    if not isinstance(pattern, str) or not _KINDS.keys() >= set(pattern):
        raise wrong("hybrid_override_pattern", f"{pattern!r} has other letters than {' '.join(_KINDS)}")
    return [_KINDS[letter] for letter in pattern]


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    kinds = fields.kinds("layer_types", (*MAMBA_KINDS, *ATTENTION_KINDS, "mlp", "moe"), config.layers)
    inner = fields.count("mamba_n_heads", 128) * fields.count("mamba_d_head")
    mamba = frozenset(layer for layer, kind in enumerate(kinds) if kind in MAMBA_KINDS)
    moe = config.moe
    if moe is not None:
        moe = replace(
            moe,
            shared_size=fields.count("moe_shared_expert_intermediate_size"),
            latent_size=fields.count("moe_latent_size") if fields.has("moe_latent_size") else None,
            gate=None,
        )
    return replace(
        config,
        moe=moe,
        recurrent=parse_mamba2(fields, mamba, inner, config.rms_norm_eps),
        unrotated=frozenset(range(config.layers)),
        attention_layers=[layer for layer, kind in enumerate(kinds) if kind in ATTENTION_KINDS],
    )


FAMILIES = (
    ModelFamily(
        architectures=("NemotronHForCausalLM",),
        build=build,
        fields=field_table(
            "hybrid_override_pattern layer_types mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state "
            "mamba_n_groups mamba_n_heads mlp_bias moe_intermediate_size moe_latent_size "
            "moe_shared_expert_intermediate_size n_group n_routed_experts norm_topk_prob num_experts_per_tok "
            "routed_scaling_factor time_step_min topk_group use_bias",
            without_effect=because(
                {
                    "a choice of kernels": "chunk_size mamba_chunk_size moe_shared_expert_overlap use_mamba_kernels",
                    "of new weights": "mamba_dt_init_floor mamba_dt_max rescale_prenorm_residual time_step_floor "
                    "time_step_max",
                    "of training": "hidden_dropout",
                    "of what a call returns": "num_logits_to_keep",
                    "of multi-token prediction (MTP) layers": "mtp_hybrid_override_pattern mtp_layers_block_type",
                    "states are always in float32": "mamba_ssm_cache_dtype",
                    "transformers never ties the head": "tie_word_embeddings",
                    "layers do not rotate": "original_max_position_embeddings partial_rotary_factor rope_parameters "
                    "rope_scaling rope_theta",
                    NOT_READ: "attention_bias expand hidden_act mamba_dt_limit mamba_expand mamba_proj_bias "
                    "n_shared_experts residual_in_fp32 sliding_window time_step_limit",
                }
            ),
            refused={
                "mamba_hidden_act": Refused(("silu",), "only silu is"),
                "mlp_hidden_act": Refused(("relu2",), "only relu2 is"),
            },
            aliases={
                **ROUTED,
                "conv_kernel": "mamba_d_conv",
                "layer_norm_epsilon": "rms_norm_eps",
                "layers_block_type": "layer_types",
                "mamba_dt_min": "time_step_min",
                "mamba_head_dim": "mamba_d_head",
                "mamba_num_heads": "mamba_n_heads",
                "n_groups": "mamba_n_groups",
                "ssm_state_size": "mamba_d_state",
                "use_conv_bias": "mamba_conv_bias",
            },
            ships_own_code=True,
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, head_dim=128),
        normalize=_normalize,
        moe=DeepSeekMoeDefaults(experts=8, top_k=2, size=7688, shared=1, dense=0, renormalizes=True),
        adapt=_adapt,
    ),
)
