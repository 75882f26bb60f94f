"""The config.json fields of Granite's multipliers."""

from dataclasses import replace

from tercet.scheduler.models.config.config_fields import Fields
from tercet.scheduler.models.config.model_config import ModelConfig

MULTIPLIERS = "attention_multiplier embedding_multiplier logits_scaling residual_multiplier "


def with_multipliers(config: ModelConfig, fields: Fields) -> ModelConfig:
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
