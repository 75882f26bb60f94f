"""Qwen3-Next and Qwen3.5: three Gated DeltaNet layers, then one of gated attention."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import (
    EXPERTS,
    QWEN_EXPERTS,
    field_table,
)
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.config.recurrent_config import DeltaNetConfig, parse_delta_net
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import CausalLM, build_hybrid
from tercet.scheduler.models.layers.delta_net import GatedDeltaNet
from tercet.scheduler.models.layers.layers import Attention, Rotary
from tercet.scheduler.models.layers.norms import CenteredNorm
from tercet.scheduler.models.layers.shard import Shard
from tercet.scheduler.models.vision import qwen


def build(config: ModelConfig, shard: Shard, *, grouped: bool = False) -> CausalLM:
    """Build a model. `grouped`: see `GatedDeltaNet`."""

    def attention(number: int, rotary: Rotary) -> Attention:
        return Attention(
            config,
            number,
            rotary,
            shard,
            input_bias=config.attention_bias,
            output_bias=config.output_bias,
            qk_norm="heads",
            norm=CenteredNorm,
            gated=True,
        )

    net = partial(GatedDeltaNet, config, grouped=grouped)
    return build_hybrid(config, shard, DeltaNetConfig, net, attention, CenteredNorm)


_LINEAR = (
    "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
    "layer_types full_attention_interval attention_bias "
)
_MODEL = {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
}
"""transformers' defaults of Qwen3.5."""
_DENSE = field_table(_LINEAR)
_MIXTURE = field_table(_LINEAR + EXPERTS + "moe_intermediate_size shared_expert_intermediate_size")
_NEXT = field_table(_LINEAR + QWEN_EXPERTS + "shared_expert_intermediate_size")
_DEFAULTS = ConfigDefaults(head_dim=256, rotated_share=0.25)
_SEEING = replace(_DEFAULTS, sections=(11, 11, 10), alternating=True)


def _normalizer(defaults: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Return a function that adds defaults to a config."""

    def normalize(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**defaults, **config}

    return normalize


def _with_delta_net(config: ModelConfig, fields: Fields) -> ModelConfig:
    return replace(config, recurrent=parse_delta_net(fields, config.layers))


FAMILIES = (
    ModelFamily(
        architectures=("Qwen3NextForCausalLM",),
        build=partial(build, grouped=True),
        fields=_NEXT,
        defaults=_DEFAULTS,
        normalize=_normalizer({"norm_topk_prob": True}),
        moe=MoeDefaults(
            experts=512, top_k=10, size=("moe_intermediate_size", 512), shared_size=512, chooses_layers=True
        ),
        adapt=_with_delta_net,
    ),
    ModelFamily(
        architectures=("Qwen3_5ForCausalLM",),
        build=build,
        fields=_DENSE,
        defaults=_SEEING,
        images=qwen.image_model,
        normalize=_normalizer(_MODEL),
        adapt=_with_delta_net,
    ),
    ModelFamily(
        architectures=("Qwen3_5MoeForCausalLM",),
        build=build,
        fields=_MIXTURE,
        defaults=_SEEING,
        images=qwen.image_model,
        moe=MoeDefaults(experts=256, top_k=8, size=("moe_intermediate_size", 512), shared_size=512, renormalizes=True),
        normalize=_normalizer(
            {**_MODEL, "hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "intermediate_size": 1},
        ),
        adapt=_with_delta_net,
    ),
)
