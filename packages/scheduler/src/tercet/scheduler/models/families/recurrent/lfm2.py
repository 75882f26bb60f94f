"""LFM2 and LFM2-MoE: gated short convolutions between layers of attention."""

from dataclasses import replace
from functools import partial

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields, wrong
from tercet.scheduler.models.config.field_support import EXPERTS, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.config.recurrent_config import ShortConvConfig, parse_short_conv
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, build_hybrid
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.layers.short_conv import ShortConv


def build(config: ModelConfig, shard: Shard) -> CausalLM:
    """Build Lfm2ForCausalLM or Lfm2MoeForCausalLM."""

    def attention(number: int, rotary: Rotary) -> Attention:
        return Attention(config, number, rotary, shard, qk_norm="heads")

    return build_hybrid(config, shard, ShortConvConfig, partial(ShortConv, config), attention)


def _with_short_conv(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(config, recurrent=parse_short_conv(fields, config.layers, config.hidden_size))


def _adapt_dense(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Adjust the size of the MLP, which the config states as that of an MLP without gates."""
    size = config.intermediate_size
    if fields.flag("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        if fields.values.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = fields.count("block_multiple_of", 256)
            size = int(fields.number("block_ffn_dim_multiplier", 1.0) * size)
            size = -(-size // multiple) * multiple
    return _with_short_conv(replace(config, intermediate_size=size), fields)


def _adapt_mixture(config: ModelConfig, fields: Fields) -> ModelConfig:
    dense = fields.count("num_dense_layers", 2, least=0)
    if config.moe is None:
        raise wrong("num_experts", "must be at least 1")
    layers = tuple(layer >= dense for layer in range(config.layers))
    routing = replace(
        config.moe.routing,
        renormalize=fields.flag("norm_topk_prob", True),
        scale=fields.number("routed_scaling_factor", 1.0),
    )
    moe = replace(config.moe, layers=layers, routing=routing, has_correction=fields.flag("use_expert_bias", True))
    return _with_short_conv(replace(config, moe=moe if any(layers) else None), fields)


_CONV = "conv_bias conv_L_cache layer_types "
_ALIASES = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}
_DEFAULTS = ConfigDefaults(rms_norm_eps=1e-5, tied=True, rope_theta=1e6, attention_bias=None, output_bias=None)

FAMILIES = (
    ModelFamily(
        architectures=("Lfm2ForCausalLM",),
        build=build,
        fields=field_table(
            _CONV + "full_attn_idxs block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of",
            aliases={**_ALIASES, "block_ff_dim": "intermediate_size"},
        ),
        defaults=_DEFAULTS,
        adapt=_adapt_dense,
    ),
    ModelFamily(
        architectures=("Lfm2MoeForCausalLM",),
        build=build,
        fields=field_table(
            _CONV + EXPERTS + "moe_intermediate_size norm_topk_prob num_dense_layers routed_scaling_factor "
            "use_expert_bias",
            aliases=_ALIASES,
        ),
        defaults=_DEFAULTS,
        moe=MoeDefaults(experts=32, top_k=4, size=("moe_intermediate_size", 1792), score="sigmoid"),
        adapt=_adapt_mixture,
    ),
)
