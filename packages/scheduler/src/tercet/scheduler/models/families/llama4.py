"""Llama 4: chunked attention with rotation and weightless norms, or full attention without; experts in some layers.

Of the layers without rotary embedding, queries grow with their positions (`QueryScaling`). Weights of experts multiply
their inputs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import EXPERTS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeConfig, MoeDefaults
from tercet.scheduler.models.config.rope_config import QueryScaling
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary, Unrotated
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.norms import WeightlessNorm
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.vision import wrappers


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Llama4ForCausalLM."""
    unrotated = Unrotated(config)
    rotated = Rotary(config, config.local_rope)

    def layer(number: int, _: Rotary) -> DecoderLayer:
        rotates = number not in config.unrotated
        attention = Attention(
            config,
            number,
            rotated if rotates else unrotated,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm="heads" if rotates and config.norms_heads else "none",
            norm=WeightlessNorm,
        )
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


def _normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Give sizes the names that they have in other families."""
    expert, dense = (
        8192 if config.get("intermediate_size") is None else config["intermediate_size"],
        16_384 if config.get("intermediate_size_mlp") is None else config["intermediate_size_mlp"],
    )
    sizes = {"moe_intermediate_size": expert, "shared_expert_intermediate_size": expert, "intermediate_size": dense}
    return {**config, **sizes}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    layers = config.layers
    unrotated = _unrotated(fields, layers)
    scaling = None
    if fields.values.get("attn_temperature_tuning", True):
        scaling = QueryScaling(
            strength=fields.number("attn_scale", 0.1, zero=True), length=fields.count("floor_scale", 8192), first=1
        )
    return replace(
        config,
        unrotated=unrotated,
        rope=replace(config.rope, query_scaling=scaling),
        local_rope=config.rope,
        chunks=_chunks(fields, unrotated, layers),
        norms_heads=fields.flag("use_qk_norm", True),
        moe=_with_layers(config, fields),
    )


def _unrotated(fields: Fields, layers: int) -> frozenset[int]:
    every = fields.count("no_rope_layer_interval", 4)
    rotates = fields.values.get("no_rope_layers") or [(layer + 1) % every for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) < layers or any(type(one) is not int for one in rotates):
        raise wrong("no_rope_layers", f"must have a number for each of the {layers} layers")
    return frozenset(layer for layer in range(layers) if not rotates[layer])


def _chunks(fields: Fields, unrotated: frozenset[int], layers: int) -> dict[int, int]:
    kinds = ["full_attention" if layer in unrotated else "chunked_attention" for layer in range(layers)]
    if fields.has("layer_types"):
        kinds = fields.kinds("layer_types", ("chunked_attention", "full_attention"), layers)
    chunked = [layer for layer, kind in enumerate(kinds) if kind == "chunked_attention"]
    if chunked and "attention_chunk_size" in fields.values and not fields.has("attention_chunk_size"):
        raise wrong("attention_chunk_size", "is null, but layers have chunks")
    return dict.fromkeys(chunked, fields.count("attention_chunk_size", 8192))


def _with_layers(config: ModelConfig, fields: Fields) -> MoeConfig | None:
    step = fields.count("interleave_moe_layer_step", 1)
    listed = fields.layer_list("moe_layers")
    experts = range(step - 1, config.layers, step) if listed is None else listed
    sparse = tuple(layer in experts for layer in range(config.layers))
    if config.moe is None or not any(sparse):
        return None
    return replace(
        config.moe,
        layers=sparse,
        gates_shared=False,
        has_correction=False,
        float32_router=False,
        scales_inputs=True,
    )


FAMILIES = (
    ModelFamily(
        architectures=("Llama4ForCausalLM",),
        build=build,
        fields=field_table(
            EXPERTS + "attention_bias attention_chunk_size attn_scale attn_temperature_tuning floor_scale "
            "interleave_moe_layer_step intermediate_size_mlp layer_types moe_layers no_rope_layer_interval "
            "no_rope_layers use_qk_norm"
        ),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, head_dim=128, rope_theta=5e5, interleaved=True),
        normalize=_normalize,
        moe=MoeDefaults(experts=16, top_k=1, size=("moe_intermediate_size", 8192), shared_size=8192, score="sigmoid"),
        adapt=_adapt,
        images=wrappers.image_model,
        not_native="native kernels scale no inputs of experts",
    ),
)
