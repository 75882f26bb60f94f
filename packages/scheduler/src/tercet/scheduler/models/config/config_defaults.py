"""What a family's config.json means where it is silent, and what it calls otherwise: as transformers has it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Family:
    """What leaving a field out means, and names of fields. Most are as Llama's."""

    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    """None: as many as make the hidden size with all heads."""
    tied: bool = False
    """Whether the head is the embedding."""
    attention_bias: tuple[str, bool] | None = "attention_bias", False
    """The field that says whether queries, keys and values have one, and what leaving it out means; None: always."""
    mlp_bias: str = "mlp_bias"
    """The field that says whether the MLP has one."""
    rope_theta: float = 1e4
    rope: Mapping[str, Any] = field(default_factory=dict)
    """The rotation of a config that says nothing of it."""
    rope_names: Mapping[str, str] = field(default_factory=lambda: {"su": "longrope"})
    """Types of rotation that are called otherwise: longrope was, before it had a name."""
    trained_length: int | None = None
    """`original_max_position_embeddings`; None: `max_position_embeddings`."""
    rotated_share: float | None = None
    """`partial_rotary_factor`; None where it has no meaning."""
    rotary_dim: bool = False
    """Whether a field of this name may say as much in elements of a head."""
    interleaved: bool = False
    """Whether an element is rotated with its neighbour."""
    leaves_unrotated: bool = False
    """Whether some layers may not rotate."""
    layers_ahead: int = 0
    """Layers after the others that guess tokens ahead."""
    known_code: bool = False
    """Whether a model may come with code of its own, which computes what is computed here."""


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
    """Those of the family that an architecture belongs to."""
    return _FAMILIES.get(architecture, Family())
