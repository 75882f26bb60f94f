"""Mistral, Ministral 3 and Mixtral: no biases; the sliding window is in the config (`ModelConfig.windows`)."""

from tercet.scheduler.models.config.attention_windows import Windows, all_layers
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import EXPERTS, WINDOWS, Refused, field_table
from tercet.scheduler.models.config.moe_config import MoeDefaults
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.vision import wrappers

FAMILIES = (
    ModelFamily(
        architectures=("MistralForCausalLM", "MistralModel"),
        fields=field_table(WINDOWS),
        windows=Windows(usual=4096, pattern=all_layers),
        images=wrappers.image_model,
    ),
    ModelFamily(
        architectures=("Ministral3ForCausalLM",),
        fields=field_table(
            "sliding_window", refused={"layer_types": Refused((), "all layers have the window, or none has")}
        ),
        defaults=ConfigDefaults(
            rms_norm_eps=1e-5,
            head_dim=128,
            rope_theta=1e6,
            rope={
                "rope_type": "yarn",
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            scales_queries=True,
        ),
        windows=Windows(),
        images=wrappers.image_model,
    ),
    ModelFamily(
        architectures=("MixtralForCausalLM", "MixtralModel"),
        fields=field_table(EXPERTS + "sliding_window"),
        defaults=ConfigDefaults(rms_norm_eps=1e-5, rope_theta=1e6),
        windows=Windows(),
        moe=MoeDefaults(experts=8, top_k=2, renormalizes=True),
    ),
)
