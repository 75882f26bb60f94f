"""Qwen2 and Qwen2.5, some of which read images or hear: biases of queries, keys and values, and none of the output."""

from tercet.scheduler.models.audio import qwen2_audio
from tercet.scheduler.models.config.attention_windows import Windows, from_max_window_layers
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import QWEN_EXPERTS, QWEN_WINDOWS, field_table
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.vision import qwen, wrappers


def _every_second_before_max_window_layers(fields: Fields, layers: int) -> list[bool]:
    first = fields.count("max_window_layers", 28, least=0)
    return [layer < first and layer % 2 == 0 for layer in range(layers)]


FAMILIES = (
    ModelFamily(
        architectures=("Qwen2ForCausalLM", "Qwen2Model"),
        fields=field_table(QWEN_WINDOWS),
        defaults=ConfigDefaults(attention_bias=None, output_bias=None),
        windows=Windows(usual=4096, switched=True, pattern=from_max_window_layers(28)),
        images=wrappers.image_model,
        sounds=qwen2_audio.sound_model,
    ),
    ModelFamily(
        architectures=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
        fields=field_table(QWEN_WINDOWS),
        defaults=ConfigDefaults(
            rms_norm_eps=1e-5,
            attention_bias=None,
            output_bias=None,
            rope_theta=1e6,
            rope_names={"mrope": "default"},
            sections=(16, 24, 24),
        ),
        windows=Windows(usual=4096, switched=True, pattern=from_max_window_layers(80)),
        images=qwen.image_model,
    ),
    ModelFamily(
        architectures=("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
        fields=field_table(QWEN_WINDOWS + QWEN_EXPERTS + "qkv_bias shared_expert_intermediate_size"),
        defaults=ConfigDefaults(attention_bias=("qkv_bias", True), output_bias=None),
        windows=Windows(usual=4096, switched=True, pattern=_every_second_before_max_window_layers),
        moe=MoeDefaults(
            experts=60, top_k=4, size=("moe_intermediate_size", 1408), shared_size=5632, chooses_layers=True
        ),
    ),
)
