"""Mistral and Mixtral: no biases; the sliding window is in the config (`ModelConfig.windows`)."""

from tercet.scheduler.models.config.attention_windows import Windows, all_layers
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, WINDOWS, field_table
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily

FAMILIES = (
    ModelFamily(
        architectures=("MistralForCausalLM", "MistralModel"),
        fields=field_table(WINDOWS),
        windows=Windows(usual=4096, pattern=all_layers),
    ),
    ModelFamily(
        architectures=("MixtralForCausalLM", "MixtralModel"),
        fields=field_table(EXPERTS + "sliding_window"),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, rope_theta=1e6),
        windows=Windows(),
        moe=MoeDefaults(experts=8, top_k=2, renormalizes=True),
    ),
)
