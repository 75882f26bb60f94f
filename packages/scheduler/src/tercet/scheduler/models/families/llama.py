"""Llama 2, 3 and 3.1, some of which read images or hear, ERNIE 4.5 and Granite: biases if the config has them."""

from tercet.scheduler.models.audio import voxtral
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.field_support import BIASES, field_table
from tercet.scheduler.models.config.multipliers import MULTIPLIERS, with_multipliers
from tercet.scheduler.models.family import ModelFamily
from tercet.scheduler.models.vision import wrappers

FAMILIES = (
    ModelFamily(
        architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),  # an older name
        fields=field_table(BIASES),
        images=wrappers.image_model,
        sounds=voxtral.sound_model,
    ),
    ModelFamily(
        architectures=("Ernie4_5ForCausalLM", "Ernie4_5Model"),
        fields=field_table("use_bias", ships_own_code=True),
        defaults=ConfigDefaults(
            rms_norm_eps=1e-5,
            head_dim=128,
            tied=True,
            attention_bias=("use_bias", False),
            mlp_bias="use_bias",
            rope_theta=5e5,
            interleaved=True,
        ),
        pad_token_id=0,
    ),
    ModelFamily(
        architectures=("GraniteForCausalLM", "GraniteModel"),
        fields=field_table(
            BIASES + MULTIPLIERS,
            ships_own_code=True,
        ),
        adapt=with_multipliers,
    ),
)
