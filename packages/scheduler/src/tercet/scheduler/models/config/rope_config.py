"""The config.json fields of rotary position embedding, in the older format and in that of transformers 5."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tercet.kernels.ops.rope import ROPE_TYPES, RopeScaling
from tercet.scheduler.models.config.attention_windows import LAYER_KINDS
from tercet.scheduler.models.config.config_defaults import ConfigDefaults
from tercet.scheduler.models.config.config_fields import LARGEST, Fields, wrong
from tercet.scheduler.models.config.field_support import names

HONOURED_ROPE = names(
    "attention_factor beta_fast beta_slow factor full_attention high_freq_factor llama_4_scaling_beta "
    "long_factor low_freq_factor mrope_section mscale mscale_all_dim original_max_position_embeddings "
    "partial_rotary_factor "
    "rope_theta rope_type short_factor sliding_attention truncate type"
)
"""Keys of `rope_parameters` that are read here or in `families/gemma/gemma.py`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScaling:
    """Factors of queries that grow with their positions: 1 + strength * log(1 + floor((position + first) / length))."""

    strength: float
    length: int
    first: int = 0

    def factors(self, positions: int) -> torch.Tensor | None:
        """Return the factors of positions 0, 1, ...: float32 [positions]; None if all are 1."""
        if not self.strength or positions + self.first <= self.length:
            return None
        with torch.device("cpu"):  # equal for every device
            steps = ((torch.arange(positions).float() + self.first) / self.length).floor()
            factors = 1 + self.strength * torch.log1p(steps)
        return factors.to(torch.get_default_device())


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding: its base, and its scaling beyond the trained length."""

    theta: float
    scaling: RopeScaling | None = None
    share: float = 1.0
    """The rotated share of each head, from its first element on."""
    interleaved: bool = False
    """Adjacent elements are rotated as pairs, not elements half a head apart."""
    proportion: float = 1.0
    """Share of a head's pairs that rotate, from the fastest on."""
    query_scaling: QueryScaling | None = None
    """Factors of the queries that are rotated."""
    sections: tuple[int, ...] = ()
    """M-RoPE: pairs of a head that rotate by the time, by the height and by the width of a token of an image. Empty:
    every token has one position."""
    alternating: bool = False
    """The pairs of the sections alternate, as far as there are some of height and width."""

    def rotated(self, head_dim: int) -> int:
        """Return the number of a head's elements that are rotated."""
        return int(head_dim * self.share)

    def parts(self, pairs: int) -> list[int]:
        """Return for each pair of a head the part of the position that it rotates by: 0, 1 or 2."""
        if self.alternating:
            return [pair % 3 if pair < 3 * self.sections[pair % 3] else 0 for pair in range(pairs)]
        rotated = [part for part, section in enumerate(self.sections) for _ in range(section)]
        return rotated + [0] * (pairs - len(rotated))

    def for_length(self, length: int) -> "RopeConfig":
        """Return the rotation of a model that serves `length` tokens, independent of the length of rotary tables."""
        scaling = self.scaling
        if scaling is None or scaling.type != "longrope":
            return self
        is_long = length > scaling.original_max_position_embeddings
        factors = scaling.long_factor if is_long else scaling.short_factor
        return replace(self, scaling=replace(scaling, short_factor=factors, long_factor=factors))


def parse_rope(config: Mapping[str, Any], defaults: ConfigDefaults, *, by_layer_types: bool = False) -> RopeConfig:
    """Parse the rotary embedding of all layers, in either format; by default the family's.

    With `by_layer_types`, the family has types of layers, and a config may set the rotation for each.
    """
    name = next((name for name in ("rope_scaling", "rope_parameters") if config.get(name)), "")
    values = config.get(name, defaults.rope)
    if not isinstance(values, Mapping):
        raise wrong(name, "is not an object")
    if any(isinstance(value, dict) for value in values.values()) or values.keys() & {*LAYER_KINDS}:
        by_layer = list(values.values())
        if not by_layer_types or not all(isinstance(value, dict) for value in by_layer):
            raise wrong(name, "must say how layers rotate, not how those of each type do")
        if any(value != by_layer[0] for value in by_layer):
            raise wrong(name, "layer types that rotate differently are not supported")
        values = by_layer[0]
    kind = values.get("rope_type", values.get("type", "default"))
    kind = defaults.rope_names.get(kind, kind) if isinstance(kind, str) else str(kind)
    if kind not in ROPE_TYPES:
        raise wrong(name, f"type {kind!r} is not supported, only {', '.join(ROPE_TYPES)}")
    outside = {field: config.get(field) for field in ("rope_theta", "partial_rotary_factor")}
    if defaults.rotary_dim and outside["partial_rotary_factor"] is None and config.get("rotary_dim") is not None:
        whole = Fields(config)
        outside["partial_rotary_factor"] = whole.count("rotary_dim") / whole.count("head_dim", defaults.head_dim or 1)
    fields = Fields({**outside, **values}, f"{name}." if name else "")
    theta = fields.number("rope_theta", defaults.rope_theta)
    return RopeConfig(
        theta=theta,
        scaling=_scaling(kind, fields, config, defaults),
        share=_rotated_share(fields, defaults),
        interleaved=defaults.interleaved,
        query_scaling=_query_scaling(fields) if defaults.scales_queries else None,
        sections=_sections(fields, defaults),
        alternating=defaults.alternating,
    )


def _query_scaling(fields: Fields) -> QueryScaling | None:
    if not fields.has("llama_4_scaling_beta"):
        return None
    strength = fields.number("llama_4_scaling_beta", zero=True)
    return QueryScaling(strength=strength, length=fields.count("original_max_position_embeddings"))


def _sections(fields: Fields, defaults: ConfigDefaults) -> tuple[int, ...]:
    if not fields.has("mrope_section"):
        return defaults.sections
    if not defaults.sections:
        raise wrong(f"{fields.where}mrope_section", "positions of images, with several numbers each, are not supported")
    return tuple(map(int, fields.numbers("mrope_section")))


def _rotated_share(fields: Fields, defaults: ConfigDefaults) -> float:
    share = fields.number("partial_rotary_factor", defaults.rotated_share or 1.0)
    if share > 1 or (share < 1 and defaults.rotated_share is None):
        raise wrong("partial_rotary_factor", f"{share} is not supported, only 1.0")
    return share


def check_rotation(rope: RopeConfig, head_dim: int) -> None:
    """Raise ModelError if the elements to rotate do not form pairs."""
    if head_dim % 2:
        raise wrong("head_dim", f"{head_dim} is odd, and rotary embedding turns pairs")
    rotated, scaling = rope.rotated(head_dim), rope.scaling
    if rotated % 2 or not rotated:
        raise wrong("partial_rotary_factor", f"{rotated} of {head_dim} elements are no pairs to turn")
    if rope.sections and (len(rope.sections) != 3 or (not rope.alternating and 2 * sum(rope.sections) != rotated)):
        raise wrong("mrope_section", f"{[*rope.sections]} are no three parts of {rotated // 2} pairs")
    if scaling is not None and scaling.type == "longrope":
        for name in ("short_factor", "long_factor"):
            if (found := len(getattr(scaling, name))) != rotated // 2:
                raise wrong(name, f"has {found} numbers for {rotated // 2} pairs")


def _scaling(kind: str, fields: Fields, config: Mapping[str, Any], defaults: ConfigDefaults) -> RopeScaling | None:
    match kind:
        case "linear":
            return RopeScaling(type=kind, factor=fields.number("factor"))
        case "llama3":
            low, high = fields.number("low_freq_factor"), fields.number("high_freq_factor")
            if low >= high:
                raise wrong(f"{fields.where}high_freq_factor", f"{high} is not above low_freq_factor {low}")
            return RopeScaling(
                type=kind,
                factor=fields.number("factor"),
                original_max_position_embeddings=_original_context(fields, config, defaults),
                low_freq_factor=low,
                high_freq_factor=high,
            )
        case "yarn":
            return _stretched(kind, fields, config, defaults)(
                beta_fast=fields.number("beta_fast", 32.0),
                beta_slow=fields.number("beta_slow", 1.0),
                mscale=fields.number("mscale", 0.0, zero=True),
                mscale_all_dim=fields.number("mscale_all_dim", 0.0, zero=True),
                truncate=fields.flag("truncate", True),
            )
        case "longrope":
            return _stretched(kind, fields, config, defaults)(
                short_factor=fields.numbers("short_factor"), long_factor=fields.numbers("long_factor")
            )
        case _:  # "dynamic" has no effect within the context length
            return None


def context_length_of(fields: Fields, scaling: RopeScaling | None) -> int:
    """Return max_position_embeddings; in a YaRN config that may be the length before stretching."""
    length = fields.count("max_position_embeddings")
    if scaling is None or scaling.type != "yarn":
        return length
    stretched = scaling.original_max_position_embeddings * scaling.factor
    if stretched > LARGEST:
        raise wrong(f"{fields.where}factor", f"{scaling.factor} times the length of training is more than {LARGEST}")
    return max(length, int(stretched))


def _stretched(
    kind: str, fields: Fields, config: Mapping[str, Any], defaults: ConfigDefaults
) -> Callable[..., RopeScaling]:
    """Return a constructor of the scalings that have an attention factor (yarn and longrope), without their own
    fields.
    """
    original = _original_context(fields, config, defaults)
    return partial(
        RopeScaling,
        type=kind,
        factor=fields.number("factor", Fields(config).count("max_position_embeddings") / original),
        original_max_position_embeddings=original,
        attention_factor=fields.number("attention_factor") if fields.has("attention_factor") else None,
    )


def _original_context(fields: Fields, config: Mapping[str, Any], defaults: ConfigDefaults) -> int:
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return Fields(config).count(name)
    return fields.count(name, defaults.trained_length or Fields(config).count("max_position_embeddings"))
