"""MiMo-V2: layers with a window have twice the key-value heads, and sinks; values are smaller than keys."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tercet.scheduler.models.config.attention_windows import Windows
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import ROUTED, WINDOWS, Refused, field_table
from tercet.scheduler.models.config.model_config import HeadShape, ModelConfig
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults
from tercet.scheduler.models.config.rope_config import parse_rope
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, DecoderLayer
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.moe import mlp_of
from tercet.scheduler.models.layers.shard import Shard


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build MiMoV2FlashForCausalLM."""
    local = Rotary(config, config.local_rope)

    def layer(number: int, rotary: Rotary) -> DecoderLayer:
        window = config.window_of(number)
        attention = Attention(
            config,
            number,
            local if window else rotary,
            shard,
            input_bias=config.attention_bias,
            sinks=window > 0,
            value_scale=config.value_scale,
        )
        return DecoderLayer(config, attention, mlp_of(config, number, shard))

    return CausalLM(config, shard, layer)


_DEFAULTS = ConfigDefaults(rms_norm_eps=1e-5, head_dim=192, output_bias=None, rotated_share=0.334)
_THETAS = {"full_attention": 5e6, "sliding_attention": 1e4}
_PUBLISHED = {
    "swa_rope_theta": Refused((1e4,), "layers with a window rotate by rope_parameters"),
    "layernorm_epsilon": Refused((1e-5,), "the name is rms_norm_eps"),
    "scoring_func": Refused(("sigmoid",), "only sigmoid is supported"),
    "add_full_attention_sink_bias": Refused((False,), "sinks in layers with full attention are not supported"),
}
"""Fields of the family's own code, which transformers does not read."""
_PUBLISHED_ROPE = {"rope_theta": 5e6, "partial_rotary_factor": 0.334}
"""Values of fields that `rope_parameters` replace."""


def _is_sliding(layer: int) -> bool:
    return layer > 0 and (layer + 1) % 6 != 0


def _normalize(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with `rope_parameters` of layers with full attention, and `local_rope` of the others.

    Published configs have types of layers in `hybrid_layer_pattern`, and a window that does not count the token itself.
    """
    usual = {"rope_scaling": None, **({} if config.get("rope_parameters") else _PUBLISHED_ROPE)}
    for name, value in usual.items():
        if config.get(name) not in (value, None):
            raise wrong(name, "rope_parameters must say how each type of layer rotates")
    plain = {name: value for name, value in config.items() if name not in _PUBLISHED_ROPE}
    pattern = plain.get("hybrid_layer_pattern")
    if plain.get("layer_types") is None and isinstance(pattern, list):
        plain["layer_types"] = ["sliding_attention" if one else "full_attention" for one in pattern]
    if plain.get("sliding_window_size") is not None:
        plain["sliding_window"] = Fields(plain).count("sliding_window_size") + 1
    said = plain.get("rope_parameters") or {
        kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in _THETAS.items()
    }
    if not isinstance(said, Mapping) or any(not isinstance(said.get(kind), Mapping) for kind in _THETAS):
        raise wrong("rope_parameters", f"must say of {' and '.join(_THETAS)} how they rotate")
    for kind in _THETAS:
        Fields(said[kind], f"rope_parameters.{kind}.").choice("rope_type", ("default",), "default")
    return {**plain, "rope_parameters": said["full_attention"], "local_rope": said["sliding_attention"]}


def _adapt(config: ModelConfig, fields: Fields) -> ModelConfig:
    value_dim = fields.count("v_head_dim", 128)
    shapes = {
        layer: HeadShape(config.kv_heads * (2 if config.window_of(layer) else 1), config.head_dim, value_dim)
        for layer in range(config.layers)
    }
    if any(config.heads % shape.kv_heads for shape in shapes.values()):
        raise wrong(
            "num_key_value_heads", f"twice {config.kv_heads} does not divide the {config.heads} attention heads"
        )
    scaled = fields.has("attention_value_scale") or "attention_value_scale" not in fields.values
    return replace(
        config,
        own_heads=shapes,
        local_rope=parse_rope({"rope_parameters": fields.values["local_rope"]}, _DEFAULTS),
        value_scale=fields.number("attention_value_scale", 0.707) if scaled else 1.0,
    )


FAMILIES = (
    ModelFamily(
        architectures=("MiMoV2FlashForCausalLM",),
        build=build,
        fields=field_table(
            WINDOWS + "attention_bias attention_value_scale hybrid_layer_pattern mlp_layer_types "
            "moe_intermediate_size n_group n_routed_experts norm_topk_prob num_experts_per_tok routed_scaling_factor "
            "sliding_window_size topk_group v_head_dim",
            refused=_PUBLISHED,
            aliases=ROUTED,
            ships_own_code=True,
        ),
        defaults=_DEFAULTS,
        windows=Windows(usual=129, pattern=lambda _, layers: [*map(_is_sliding, range(layers))]),
        moe=DeepSeekMoeDefaults(experts=256, top_k=8, size=2048, shared=0, dense=1, renormalizes=True),
        normalize=_normalize,
        adapt=_adapt,
        not_native="native kernels scale no values",
    ),
)
