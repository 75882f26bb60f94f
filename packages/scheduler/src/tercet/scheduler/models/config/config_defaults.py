"""Families' defaults and field names of config.json, equal to transformers'."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FamilyDefaults:
    """Defaults and field names of a family. Most equal Llama's."""

    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    """None: hidden size divided by the number of heads."""
    tied: bool = False
    """The head is the embedding."""
    attention_bias: tuple[str, bool] | None = "attention_bias", False
    """The field for biases of queries, keys and values, and its default; None: there always are biases."""
    mlp_bias: str = "mlp_bias"
    """The field for biases of the MLP."""
    rope_theta: float = 1e4
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The rope parameters of a config without any."""
    rope_names: Mapping[str, str] = field(default_factory=lambda: {"su": "longrope"})
    """Other names of rope types: longrope had another before it was named."""
    trained_length: int | None = None
    """Default of `original_max_position_embeddings`; None: `max_position_embeddings`."""
    rotated_share: float | None = None
    """Default of `partial_rotary_factor`; None if the family does not read it."""
    rotary_dim: bool = False
    """The config may have `rotary_dim`, the same in elements of a head."""
    interleaved: bool = False
    """Adjacent elements are rotated as pairs."""
    has_unrotated_layers: bool = False
    """Some layers may not rotate."""
    mtp_layers: int = 0
    """Default number of multi-token-prediction layers after the others."""
    ships_own_code: bool = False
    """Models may come with their own code, which computes the same as ours."""


_FAMILIES = {
    "DeepseekV2ForCausalLM": FamilyDefaults(ships_own_code=True),
    "DeepseekV3ForCausalLM": FamilyDefaults(mtp_layers=1, ships_own_code=True),
    "Dots1ForCausalLM": FamilyDefaults(ships_own_code=True),
    "Ernie4_5ForCausalLM": FamilyDefaults(
        rms_norm_eps=1e-5,
        head_dim=128,
        tied=True,
        attention_bias=("use_bias", False),
        mlp_bias="use_bias",
        rope_theta=5e5,
        interleaved=True,
        ships_own_code=True,
    ),
    "Glm4MoeForCausalLM": FamilyDefaults(rms_norm_eps=1e-5, rotated_share=0.5, mtp_layers=1),
    "Glm4MoeLiteForCausalLM": FamilyDefaults(rms_norm_eps=1e-5, mtp_layers=1),
    "GlmForCausalLM": FamilyDefaults(
        rms_norm_eps=1.5625e-7,
        head_dim=128,
        attention_bias=("attention_bias", True),
        rotated_share=0.5,
        interleaved=True,
        ships_own_code=True,
    ),
    "GptOssForCausalLM": FamilyDefaults(
        rms_norm_eps=1e-5,
        head_dim=64,
        attention_bias=("attention_bias", True),
        rope_theta=150_000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "GraniteForCausalLM": FamilyDefaults(ships_own_code=True),
    "MiniMaxM2ForCausalLM": FamilyDefaults(
        head_dim=128, rope_theta=5e6, rotated_share=1.0, rotary_dim=True, ships_own_code=True
    ),
    "MixtralForCausalLM": FamilyDefaults(rms_norm_eps=1e-5, rope_theta=1e6),
    "OlmoeForCausalLM": FamilyDefaults(rms_norm_eps=1e-5),
    "Phi3ForCausalLM": FamilyDefaults(
        rms_norm_eps=1e-5,
        rope_names={"su": "longrope", "yarn": "longrope"},
        trained_length=4096,
        rotated_share=1.0,
        ships_own_code=True,
    ),
    "Qwen2ForCausalLM": FamilyDefaults(attention_bias=None),
    "Qwen2MoeForCausalLM": FamilyDefaults(attention_bias=("qkv_bias", True)),
    "Qwen3ForCausalLM": FamilyDefaults(head_dim=128),
    "SeedOssForCausalLM": FamilyDefaults(head_dim=128, attention_bias=("attention_bias", True), ships_own_code=True),
    "SmolLM3ForCausalLM": FamilyDefaults(tied=True, rope_theta=2e6, has_unrotated_layers=True, ships_own_code=True),
}


def family_defaults(architecture: str) -> FamilyDefaults:
    """Return the defaults of the family of an architecture."""
    return _FAMILIES.get(architecture, FamilyDefaults())
