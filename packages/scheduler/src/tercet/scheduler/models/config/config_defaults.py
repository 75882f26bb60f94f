"""Defaults and field names of a family's config.json, equal to transformers'."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ConfigDefaults:
    """Defaults and field names of a family. Most equal Llama's."""

    rms_norm_eps: float = 1e-6
    head_dim: int | None = None
    """None: hidden size divided by the number of heads."""
    tied: bool = False
    """The head is the embedding."""
    attention_bias: tuple[str, bool] | None = "attention_bias", False
    """The field for biases of queries, keys and values, and its default; None: there always are biases."""
    output_bias: str | None = ""
    """The field for a bias of the output projection; empty: that of `attention_bias`; None: there never is one."""
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
    scales_queries: bool = False
    """Rope parameters may have `llama_4_scaling_beta` (`QueryScaling`)."""
    sections: tuple[int, ...] = ()
    """Default of `mrope_section`; empty if the family does not read it. See `RopeConfig.sections`."""
    alternating: bool = False
    """The pairs of these sections alternate."""
    mtp_layers: int = 0
    """Default number of multi-token-prediction layers after the others."""
