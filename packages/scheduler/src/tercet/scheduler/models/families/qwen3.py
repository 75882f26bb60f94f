"""Qwen3 and Qwen3-VL, which normalize heads of queries and keys; dots.llm1, routed like DeepSeek-V3."""

from functools import partial

from tercet.scheduler.models.config.attention_windows import Windows, from_max_window_layers
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import (
    DEEPSEEK_EXPERTS,
    EXPERTS,
    NOT_READ,
    QWEN_EXPERTS,
    QWEN_WINDOWS,
    ROUTED,
    WINDOWS,
    field_table,
)
from tercet.scheduler.models.config.moe_config import DeepSeekMoeDefaults, MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.layers.decoder import build_decoder
from tercet.scheduler.models.vision import qwen, wrappers

FAMILIES = (
    ModelFamily(
        architectures=("Qwen3ForCausalLM", "Qwen3Model"),
        build=partial(build_decoder, qk_norm="heads"),
        fields=field_table(QWEN_WINDOWS + "attention_bias"),
        defaults=ConfigDefaults(head_dim=128),
        windows=Windows(usual=4096, switched=True, pattern=from_max_window_layers(28)),
        images=wrappers.image_model,
    ),
    ModelFamily(
        architectures=("Qwen3VLForConditionalGeneration",),
        build=partial(build_decoder, qk_norm="heads"),
        fields=field_table("attention_bias", without_effect={"layer_types": NOT_READ}),
        defaults=ConfigDefaults(head_dim=128, rope_theta=5e5, sections=(24, 20, 20), alternating=True),
        images=qwen.image_model,
    ),
    ModelFamily(
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        build=partial(build_decoder, qk_norm="heads"),
        fields=field_table(
            EXPERTS + "attention_bias decoder_sparse_step mlp_only_layers moe_intermediate_size",
            without_effect={"layer_types": NOT_READ},
        ),
        defaults=ConfigDefaults(rope_theta=5e5, sections=(24, 20, 20), alternating=True),
        moe=MoeDefaults(
            experts=60, top_k=4, size=("moe_intermediate_size", 1408), chooses_layers=True, renormalizes=True
        ),
        images=qwen.image_model,
    ),
    ModelFamily(
        architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        build=partial(build_decoder, qk_norm="heads"),
        fields=field_table(QWEN_EXPERTS + "attention_bias sliding_window use_sliding_window"),
        windows=Windows(usual=4096, switched=True),
        moe=MoeDefaults(experts=128, top_k=8, size=("moe_intermediate_size", 768), chooses_layers=True),
        images=wrappers.image_model,
    ),
    ModelFamily(
        architectures=("Dots1ForCausalLM",),
        build=partial(build_decoder, qk_norm="heads"),
        fields=field_table(DEEPSEEK_EXPERTS + WINDOWS + "max_window_layers", aliases=ROUTED, ships_own_code=True),
        windows=Windows(usual=4096, pattern=from_max_window_layers(62)),
        moe=DeepSeekMoeDefaults(experts=None, top_k=None, size=1408, shared=None, dense=0, renormalizes=False),
    ),
)
