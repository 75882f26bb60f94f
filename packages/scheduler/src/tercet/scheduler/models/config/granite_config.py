"""What a Granite's config.json says beside what a Llama's does: four multipliers."""

from typing import TypedDict

from tercet.scheduler.models.config.config_fields import Fields


class GraniteMultipliers(TypedDict):
    """Fields of a `ModelConfig`."""

    embedding_scale: float
    rms_norm_eps: float
    attention_scale: float
    logit_divisor: float


def granite_fields(fields: Fields, eps: float) -> GraniteMultipliers:
    """What differs from a Llama's `ModelConfig`, of which `eps` is that of the norms.

    What attention and MLP give is added times a `residual_multiplier`. Here it is added as it is, to a sum that is
    smaller by that factor from the embedding on, which norms do not see but for their epsilon.
    """
    multiplier = fields.number("residual_multiplier", 1.0)
    return {
        "embedding_scale": fields.number("embedding_multiplier", 1.0) / multiplier,
        "rms_norm_eps": eps / multiplier**2,
        "attention_scale": fields.number("attention_multiplier", 1.0),
        "logit_divisor": fields.number("logits_scaling", 1.0),
    }
