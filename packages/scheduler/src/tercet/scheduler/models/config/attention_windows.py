"""The config.json fields of sliding windows."""

from collections.abc import Callable
from dataclasses import dataclass

from tercet.scheduler.models.config.config_fields import Fields

LAYER_KINDS = {"attention": False, "full_attention": False, "sliding_attention": True}
"""Values of `layer_types`, and whether such a layer has the window; the first is an older name of the second."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The window settings of a family."""

    usual: int | None = None
    """The window if `sliding_window` is absent; None, like null, means full attention."""
    switched: bool = False
    """Windows need `use_sliding_window`."""
    pattern: Callable[[Fields, int], list[bool]] | None = None
    """The layers with a window if `layer_types` is absent; None in families that do not read it: all layers."""


def windows_of(fields: Fields, windows: Windows | None, layers: int) -> tuple[int, ...]:
    """Return the window of each layer, 0 for full attention. Raise ModelError."""
    if windows is None or (windows.switched and not fields.flag("use_sliding_window")):
        return (0,) * layers
    if fields.values.get("sliding_window", windows.usual) is None:
        return (0,) * layers
    window = fields.count("sliding_window", windows.usual or 1)
    slides = [True] * layers
    if windows.pattern is not None and fields.has("layer_types"):
        slides = [LAYER_KINDS[kind] for kind in fields.kinds("layer_types", tuple(LAYER_KINDS), layers)]
    elif windows.pattern is not None:
        slides = windows.pattern(fields, layers)
    return tuple(window if each else 0 for each in slides)


def all_layers(_: Fields, layers: int) -> list[bool]:
    """Return a window in every layer."""
    return [True] * layers


def every_second_layer(_: Fields, layers: int) -> list[bool]:
    """Return a window in every second layer, beginning with the first."""
    return [layer % 2 == 0 for layer in range(layers)]


def from_max_window_layers(usual: int) -> Callable[[Fields, int], list[bool]]:
    """Return a pattern with a window from layer `max_window_layers` on."""

    def pattern(fields: Fields, layers: int) -> list[bool]:
        first = fields.count("max_window_layers", usual, least=0)
        return [layer >= first for layer in range(layers)]

    return pattern
