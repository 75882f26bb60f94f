"""The config.json fields of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

import math
from dataclasses import dataclass
from typing import TypedDict

from tercet.kernels.ops.rope import RopeScaling
from tercet.scheduler.models.config.config_fields import Fields, wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention: keys and values are projections of one short vector per token, the latent.

    A token caches its latent followed by the rotated part of its keys, which all heads share.
    """

    rank: int
    """Elements of a latent (kv_lora_rank)."""
    query_rank: int
    """Elements of the vector that queries are projected from (q_lora_rank); 0 if that is the hidden state."""
    nope_dim: int
    """Elements of a query or key head without rotation (qk_nope_head_dim)."""
    rope_dim: int
    """Elements of a query or key head with rotation (qk_rope_head_dim)."""
    value_dim: int
    """Elements of a value head (v_head_dim)."""

    @property
    def query_dim(self) -> int:
        """Elements of a query or key head."""
        return self.nope_dim + self.rope_dim

    @property
    def cached_dim(self) -> int:
        """Elements that a token caches in a layer."""
        return self.rank + self.rope_dim


class LatentFields(TypedDict):
    """Fields of a `ModelConfig`."""

    kv_heads: int
    head_dim: int
    attention_scale: float


@dataclass(frozen=True, kw_only=True)
class LatentDefaults:
    """transformers' defaults of a family."""

    query_rank: int = 1536
    """0: queries are projected from the hidden state."""
    nope_dim: int = 128
    value_dim: int = 128
    interleaved: bool | None = True
    """Default of `rope_interleave`; None: always true, without a field."""


def parse_latent(fields: Fields, family: LatentDefaults) -> LatentConfig:
    """Parse the latent attention of a model. Raise ModelError."""
    plain = not fields.has("q_lora_rank") and ("q_lora_rank" in fields.values or not family.query_rank)
    latent = LatentConfig(
        rank=fields.count("kv_lora_rank", 512),
        query_rank=0 if plain else fields.count("q_lora_rank", family.query_rank),
        nope_dim=fields.count("qk_nope_head_dim", family.nope_dim),
        rope_dim=fields.count("qk_rope_head_dim", 64),
        value_dim=fields.count("v_head_dim", family.value_dim),
    )
    if fields.has("head_dim") and fields.values["head_dim"] != latent.rope_dim:
        raise wrong("head_dim", f"{fields.values['head_dim']!r} is not qk_rope_head_dim, which is {latent.rope_dim}")
    if latent.rope_dim % 2:
        raise wrong("qk_rope_head_dim", f"{latent.rope_dim} is odd, and rotary embedding turns pairs")
    if plain and fields.flag("attention_bias"):
        raise wrong("attention_bias", "of latents without queries that have one is not supported")
    if fields.flag("mlp_bias"):
        raise wrong("mlp_bias", "MLPs with biases are not supported beside latent attention")
    return latent


def is_interleaved(fields: Fields, family: LatentDefaults) -> bool:
    """Return whether adjacent elements are rotated as pairs."""
    return family.interleaved is None or fields.flag("rope_interleave", family.interleaved)


def latent_fields(latent: LatentConfig, scaling: RopeScaling | None) -> LatentFields:
    """Return a model's `ModelConfig` fields: for the KV cache it has one head, whose values are a part of its keys."""
    return {
        "kv_heads": 1,
        "head_dim": latent.cached_dim,
        "attention_scale": latent.query_dim**-0.5 * _yarn_score_factor(scaling),
    }


def _yarn_score_factor(scaling: RopeScaling | None) -> float:
    """Return YaRN's factor on attention scores: the square of the factor of `mscale_all_dim`.

    Cosines and sines are multiplied by the quotient of the factors of `mscale` and `mscale_all_dim`: see
    `tercet.kernels.ops.rope`. transformers and DeepSeek's published code do the same, except that their defaults of
    these two fields differ. Published models have both.
    """
    if scaling is None or not scaling.mscale_all_dim or scaling.factor <= 1:
        return 1.0
    return (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1.0) ** 2
