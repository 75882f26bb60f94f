"""Sizes of the arrays that models take, from an image's own size."""

import math

from tercet.protocol.messages.media import FixedSize, ImageSize, LongestEdge, PixelRange

_MAX_ASPECT_RATIO = 200
"""Maximum ratio of the sides of an image whose own ratio is kept, as in Qwen's image processors."""


class AspectRatioError(ValueError):
    """Image with one side much longer than the other."""


def array_size(height: int, width: int, size: ImageSize, patch: int) -> tuple[int, int]:
    """Return height and width of the array of an image: multiples of `patch`. Raises AspectRatioError."""
    match size:
        case FixedSize():
            return size.height, size.width
        case PixelRange():
            _check_ratio(height, width)
            return _within(height, width, size, patch)
        case LongestEdge():
            _check_ratio(height, width)
            return _below(height, width, size.max_edge, patch)


def _check_ratio(height: int, width: int) -> None:
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        raise AspectRatioError(f"it has {width} x {height} pixels, and no side may be 200 times as long as the other")


def _within(height: int, width: int, size: PixelRange, patch: int) -> tuple[int, int]:
    """Return the nearest size with a number of pixels in a range, by the rule of Qwen2-VL's `smart_resize`."""
    rounded = round(height / patch) * patch, round(width / patch) * patch
    if math.prod(rounded) > size.max_pixels:
        scale = math.sqrt(height * width / size.max_pixels)
        return (
            max(patch, math.floor(height / scale / patch) * patch),
            max(patch, math.floor(width / scale / patch) * patch),
        )
    if math.prod(rounded) < size.min_pixels:
        scale = math.sqrt(size.min_pixels / (height * width))
        return math.ceil(height * scale / patch) * patch, math.ceil(width * scale / patch) * patch
    return rounded


def _below(height: int, width: int, max_edge: int, patch: int) -> tuple[int, int]:
    """Return a size with sides of at most `max_edge`, by the rule of Pixtral's image processor."""
    ratio = max(height, width) / max_edge
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return max(1, math.ceil(height / patch)) * patch, max(1, math.ceil(width / patch)) * patch
