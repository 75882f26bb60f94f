"""Sliding windows and unrotated layers, by each family's fields of config.json."""

from collections.abc import Callable
from dataclasses import dataclass

from tercet.scheduler.models.config.config_fields import Fields, wrong

LAYER_KINDS = {"attention": False, "full_attention": False, "sliding_attention": True}
"""Values of `layer_types`, and whether such a layer has the window; the first is an older name of the second."""


@dataclass(frozen=True, kw_only=True)
class _Windows:
    """The window settings of a family."""

    usual: int | None = None
    """The window if `sliding_window` is absent; None, like null, means full attention."""
    switched: bool = False
    """Windows need `use_sliding_window`."""
    pattern: Callable[[Fields, int], list[bool]] | None = None
    """The layers with a window if `layer_types` is absent; None in families that do not read it: all layers."""


def windows_of(fields: Fields, architecture: str, layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 for full attention. Raise ModelError."""
    family = _FAMILIES.get(architecture)
    if family is None or (family.switched and not fields.flag("use_sliding_window")):
        return (0,) * layers
    if fields.values.get("sliding_window", family.usual) is None:
        return (0,) * layers
    window = fields.count("sliding_window", family.usual or 1)
    slides = [True] * layers
    if family.pattern is not None and fields.has("layer_types"):
        slides = [LAYER_KINDS[kind] for kind in fields.kinds("layer_types", tuple(LAYER_KINDS), layers)]
    elif family.pattern is not None:
        slides = family.pattern(fields, layers)
    return tuple(window if each else 0 for each in slides)


def unrotated_layers(fields: Fields, layers: int) -> frozenset[int]:
    """Return the layers for which `no_rope_layers` has a 0; by default every fourth, or as the interval field says."""
    name = "no_rope_layers"
    every = fields.count("no_rope_layer_interval", 4)
    rotates = fields.values.get(name)
    if rotates is None:
        rotates = [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotates, list) or len(rotates) != layers or any(one not in (0, 1) for one in rotates):
        raise wrong(name, f"must say 0 or 1 for each of the {layers} layers")
    return frozenset(layer for layer, one in enumerate(rotates) if not one)


def _all(_: Fields, layers: int) -> list[bool]:
    return [True] * layers


def _every_second(_: Fields, layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(layers)]


def _from_the_border(usual: int) -> Callable[[Fields, int], list[bool]]:
    def pattern(fields: Fields, layers: int) -> list[bool]:
        border = fields.count("max_window_layers", usual, least=0)
        return [layer >= border for layer in range(layers)]

    return pattern


def _every_second_before_the_border(fields: Fields, layers: int) -> list[bool]:
    border = fields.count("max_window_layers", 28, least=0)
    return [layer < border and layer % 2 == 0 for layer in range(layers)]


def _unrotated(fields: Fields, layers: int) -> list[bool]:
    unrotated = unrotated_layers(fields, layers)
    return [layer in unrotated for layer in range(layers)]


_GEMMA = _Windows(usual=4096, pattern=_every_second)  # `normalize_gemma` has set `layer_types`
_FAMILIES = {
    "Dots1ForCausalLM": _Windows(usual=4096, pattern=_from_the_border(62)),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "GptOssForCausalLM": _Windows(usual=128, pattern=_every_second),
    "MistralForCausalLM": _Windows(usual=4096, pattern=_all),
    "MixtralForCausalLM": _Windows(),
    "Phi3ForCausalLM": _Windows(),
    "Qwen2ForCausalLM": _Windows(usual=4096, switched=True, pattern=_from_the_border(28)),
    "Qwen2MoeForCausalLM": _Windows(usual=4096, switched=True, pattern=_every_second_before_the_border),
    "Qwen3ForCausalLM": _Windows(usual=4096, switched=True, pattern=_from_the_border(28)),
    "Qwen3MoeForCausalLM": _Windows(usual=4096, switched=True),
    "SmolLM3ForCausalLM": _Windows(switched=True, pattern=_unrotated),
}
