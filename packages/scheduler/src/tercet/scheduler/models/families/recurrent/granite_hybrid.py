"""Granite 4, with or without experts, and Bamba: Mamba 2 layers between layers of attention."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tercet.kernels.ops.moe import Routing
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import EXPERTS, because, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeConfig
from tercet.scheduler.models.config.multipliers import MULTIPLIERS, with_multipliers
from tercet.scheduler.models.config.recurrent_config import Mamba2Config, mamba_layers, parse_mamba2
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, build_hybrid
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.mamba2 import Mamba2
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build GraniteMoeHybridForCausalLM or BambaForCausalLM."""

    def attention(number: int, rotary: Rotary) -> Attention:
        return Attention(
            config, number, rotary, shard, input_bias=config.attention_bias, output_bias=config.output_bias
        )

    return build_hybrid(config, shard, Mamba2Config, partial(Mamba2, config), attention)


def _adapt_granite(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Add the experts, whose shared one is the only MLP of a model without others."""
    shared = fields.count("shared_intermediate_size", 1024)
    rotates = fields.choice("position_embedding_type", ("nope", "rope"), "nope") == "rope"
    moe = None
    if experts := fields.count("num_experts", 8, least=0):
        top_k = fields.count("num_experts_per_tok", 2)
        if top_k > experts:
            raise wrong("num_experts_per_tok", f"{top_k} is more than the {experts} experts")
        moe = MoeConfig(
            experts=experts,
            routing=Routing(top_k=top_k, renormalize=True),
            intermediate_size=config.intermediate_size,
            shared_size=shared,
            layers=(True,) * config.layers,
            gates_shared=False,
        )
    return replace(
        with_multipliers(config, fields),
        intermediate_size=shared,
        moe=moe,
        unrotated=frozenset() if rotates else frozenset(range(config.layers)),
        recurrent=_mamba2(config, fields, mamba_layers(fields, config.layers)),
    )


def _adapt_bamba(config: ModelConfig, fields: Fields) -> ModelConfig:
    layers = frozenset(range(config.layers)) - set(fields.layer_list("attn_layer_indices") or ())
    return replace(config, recurrent=_mamba2(config, fields, layers))


def _mamba2(config: ModelConfig, fields: Fields, layers: frozenset[int]) -> Mamba2Config:
    return parse_mamba2(fields, layers, fields.count("mamba_expand", 2) * config.hidden_size, config.rms_norm_eps)


def _normalize_bamba(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add transformers' defaults."""
    return {"num_key_value_heads": 8, "max_position_embeddings": 262_144, **config}


_MAMBA = (
    "attention_bias mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads "
    "mamba_proj_bias time_step_limit "
)
_CHUNKS = {"mamba_chunk_size": "a choice of kernels"}


FAMILIES = (
    ModelFamily(
        architectures=("GraniteMoeHybridForCausalLM",),
        build=build,
        fields=field_table(
            MULTIPLIERS + EXPERTS + _MAMBA + "layer_types position_embedding_type shared_intermediate_size",
            without_effect=_CHUNKS,
            aliases={"layers_block_type": "layer_types"},
        ),
        adapt=_adapt_granite,
    ),
    ModelFamily(
        architectures=("BambaForCausalLM",),
        build=build,
        fields=field_table(
            _MAMBA + "attn_layer_indices mlp_bias",
            without_effect={
                **_CHUNKS,
                **because(
                    {
                        "of training": "z_loss_coefficient",
                        "of what a call returns": "num_logits_to_keep",
                        "attn_layer_indices decides": "layer_types layers_block_type",
                        "transformers reads that of rope_parameters alone": "partial_rotary_factor",
                    }
                ),
            },
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, rotated_share=0.5),
        normalize=_normalize_bamba,
        adapt=_adapt_bamba,
    ),
)
