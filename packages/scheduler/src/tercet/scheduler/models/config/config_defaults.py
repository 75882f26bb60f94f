"""Families' defaults and field names of config.json, equal to transformers'."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
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
    leaves_unrotated: bool = False
    """Some layers may not rotate."""
    layers_ahead: int = 0
    """Default number of multi-token-prediction layers after the others."""
    known_code: bool = False
    """Models may come with their own code, which computes the same as ours."""


_FAMILIES = {
    "DeepseekV2ForCausalLM": Family(known_code=True),
    "DeepseekV3ForCausalLM": Family(layers_ahead=1, known_code=True),
    "Dots1ForCausalLM": Family(known_code=True),
    "Ernie4_5ForCausalLM": Family(
        rms_norm_eps=1e-5,
        head_dim=128,
        tied=True,
        attention_bias=("use_bias", False),
        mlp_bias="use_bias",
        rope_theta=5e5,
        interleaved=True,
        known_code=True,
    ),
    "Glm4MoeForCausalLM": Family(rms_norm_eps=1e-5, rotated_share=0.5, layers_ahead=1),
    "Glm4MoeLiteForCausalLM": Family(rms_norm_eps=1e-5, layers_ahead=1),
    "GlmForCausalLM": Family(
        rms_norm_eps=1.5625e-7,
        head_dim=128,
        attention_bias=("attention_bias", True),
        rotated_share=0.5,
        interleaved=True,
        known_code=True,
    ),
    "GptOssForCausalLM": Family(
        rms_norm_eps=1e-5,
        head_dim=64,
        attention_bias=("attention_bias", True),
        rope_theta=150_000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
    ),
    "GraniteForCausalLM": Family(known_code=True),
    "MiniMaxM2ForCausalLM": Family(head_dim=128, rope_theta=5e6, rotated_share=1.0, rotary_dim=True, known_code=True),
    "MixtralForCausalLM": Family(rms_norm_eps=1e-5, rope_theta=1e6),
    "OlmoeForCausalLM": Family(rms_norm_eps=1e-5),
    "Phi3ForCausalLM": Family(
        rms_norm_eps=1e-5,
        rope_names={"su": "longrope", "yarn": "longrope"},
        trained_length=4096,
        rotated_share=1.0,
        known_code=True,
    ),
    "Qwen2ForCausalLM": Family(attention_bias=None),
    "Qwen2MoeForCausalLM": Family(attention_bias=("qkv_bias", True)),
    "Qwen3ForCausalLM": Family(head_dim=128),
    "SeedOssForCausalLM": Family(head_dim=128, attention_bias=("attention_bias", True), known_code=True),
    "SmolLM3ForCausalLM": Family(tied=True, rope_theta=2e6, leaves_unrotated=True, known_code=True),
}


def conventions_of(architecture: str) -> Family:
    """Return the defaults of the family of an architecture."""
    return _FAMILIES.get(architecture, Family())
