"""Mamba 2 alone: no layer has attention or an MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import because, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.recurrent_config import Mamba2Config, parse_mamba2
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, SingleLayer, states_of
from tercet.scheduler.models.layers.mamba2 import Mamba2
from tercet.scheduler.models.layers.shard import Shard

_DEFAULTS = {
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 8,
    "max_position_embeddings": 262_144,
}
"""transformers' defaults of absent fields. The length is ours: a state has no limit, and tables of slots need one."""
WITHOUT_ATTENTION = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1}
"""Sizes of parts that no layer has."""


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Mamba2ForCausalLM."""
    mamba = states_of(config, Mamba2Config)
    return CausalLM(config, shard, lambda number, _: SingleLayer(config, Mamba2(config, number, mamba, shard)))


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_DEFAULTS, **config, **WITHOUT_ATTENTION}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    inner = fields.count("mamba_expand", 2) * config.hidden_size
    layers = frozenset(range(config.layers))
    return replace(config, recurrent=parse_mamba2(fields, layers, inner, config.rms_norm_eps))


FAMILIES = (
    ModelFamily(
        architectures=("Mamba2ForCausalLM",),
        build=build,
        fields=field_table(
            "mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads "
            "mamba_proj_bias time_step_limit",
            without_effect=because(
                {
                    "a choice of kernels": "chunk_size",
                    "every layer is of one kind": "layer_types",
                    "of new weights": "rescale_prenorm_residual time_step_floor time_step_max time_step_min",
                    "transformers computes with no matrix of this rank": "time_step_rank",
                    "residuals have the model's dtype here": "residual_in_fp32",
                }
            ),
            aliases={
                "conv_kernel": "mamba_d_conv",
                "expand": "mamba_expand",
                "head_dim": "mamba_d_head",
                "layer_norm_epsilon": "rms_norm_eps",
                "n_groups": "mamba_n_groups",
                "num_heads": "mamba_n_heads",
                "state_size": "mamba_d_state",
                "use_bias": "mamba_proj_bias",
                "use_conv_bias": "mamba_conv_bias",
            },
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5),
        normalize=_normalize,
        adapt=_adapt,
    ),
)
