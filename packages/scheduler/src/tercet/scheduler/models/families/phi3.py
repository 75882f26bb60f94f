"""Phi-3, Phi-3.5 and Phi-4: no biases. Checkpoints store queries, keys and values fused, and gate and up."""

from tercet.scheduler.models.config.attention_windows import Windows
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import field_table
from tercet.scheduler.models.family import ModelFamily

FAMILIES = (
    ModelFamily(
        architectures=("Phi3ForCausalLM", "Phi3Model"),
        fields=field_table("sliding_window", ships_own_code=True),
        defaults=ConfigDefaults(
            rms_norm_eps=1e-5,
            rope_names={"su": "longrope", "yarn": "longrope"},
            trained_length=4096,
            rotated_share=1.0,
        ),
        windows=Windows(),
        pad_token_id=32_000,
    ),
)
