"""Llama 2, 3 and 3.1, ERNIE 4.5 and Granite: biases if the config has them."""

from dataclasses import replace

from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.field_support import BIASES, field_table
from tercet.scheduler.models.config.model_config import ModelConfig
from tercet.scheduler.models.family import ModelFamily


def _with_multipliers(config: ModelConfig, fields: Fields) -> ModelConfig:
    """Apply Granite's multipliers.

    Granite multiplies the outputs of attention and MLP by `residual_multiplier` before adding them. Here they are added
    unscaled to a residual that is smaller by that factor from the embedding on; norms are invariant to this except for
    their epsilon.
    """
    multiplier = fields.number("residual_multiplier", 1.0)
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", 1.0) / multiplier,
        rms_norm_eps=config.rms_norm_eps / multiplier**2,
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_divisor=fields.number("logits_scaling", 1.0),
    )


FAMILIES = (
    ModelFamily(
        architectures=("LlamaForCausalLM", "LlamaModel", "LLaMAForCausalLM"),  # an older name
        fields=field_table(BIASES),
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
            BIASES + "attention_multiplier embedding_multiplier logits_scaling residual_multiplier",
            ships_own_code=True,
        ),
        adapt=_with_multipliers,
    ),
)
