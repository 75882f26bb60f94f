"""Granite's config.json fields in addition to Llama's: four multipliers."""

from typing import TypedDict

from tercet.scheduler.models.config.config_fields import Fields


class GraniteMultipliers(TypedDict):
    """Fields of a `ModelConfig`."""

    embedding_scale: float
    rms_norm_eps: float
    attention_scale: float
    logit_divisor: float


def granite_fields(fields: Fields, eps: float) -> GraniteMultipliers:
    """Return the fields of a `ModelConfig` that differ from Llama's; `eps` is the norms' epsilon.

    Granite multiplies the outputs of attention and MLP by `residual_multiplier` before adding them. Here they are added
    unscaled to a residual that is smaller by that factor from the embedding on; norms are invariant to this except for
    their epsilon.
    """
    multiplier = fields.number("residual_multiplier", 1.0)
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0) / multiplier,
        "rms_norm_eps": eps / multiplier**2,
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "logit_divisor": fields.number("logits_scaling", 1.0),
    }
