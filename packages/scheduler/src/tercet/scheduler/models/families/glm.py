"""GLM-4 of 2024: biases of queries, keys and values. Checkpoints store gate and up fused.

Adjacent elements of the first half of each head are rotated (`ModelConfig.rope`).
"""

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import field_table
from tercet.scheduler.models.family import ModelFamily

FAMILIES = (
    ModelFamily(
        architectures=("GlmForCausalLM", "GlmModel"),
        fields=field_table("attention_bias", ships_own_code=True),
        defaults=ConfigDefaults(
            rms_norm_eps=1.5625e-7,
            head_dim=128,
            attention_bias=("attention_bias", True),
            output_bias=None,
            rotated_share=0.5,
            interleaved=True,
        ),
        pad_token_id=151_329,
    ),
)
