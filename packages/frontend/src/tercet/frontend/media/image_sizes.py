"""Sizes of the arrays that models take, from an image's own size. Sizes are (height, width)."""

import math
import struct

from tercet.protocol.messages.media import AspectTiles, CanvasTiles, FilledPixels, FixedSize, LongestEdge, PixelRange

Size = tuple[int, int]

_MAX_ASPECT_RATIO = 200
"""Maximum ratio of the sides of an image whose own ratio is kept, as in Qwen's image processors."""


class AspectRatioError(ValueError):
    """Image with one side much longer than the other."""


def array_size(height: int, width: int, size: FixedSize | PixelRange | LongestEdge | FilledPixels, patch: int) -> Size:
    """Return the size of an image that is resized once: multiples of `patch`. Raises AspectRatioError."""
    match size:
        case FixedSize():
            return size.height, size.width
        case PixelRange():
            check_ratio(height, width)
            return _within(height, width, size, patch)
        case LongestEdge():
            check_ratio(height, width)
            return _below(height, width, size.max_edge, patch)
        case FilledPixels():
            return _filling(height, width, size.max_pixels, patch)


def check_ratio(height: int, width: int) -> None:
    """Raise AspectRatioError for an image with one side much longer than the other."""
    if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
        raise AspectRatioError(f"it has {width} x {height} pixels, and no side may be 200 times as long as the other")


def _within(height: int, width: int, size: PixelRange, patch: int) -> Size:
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


def _below(height: int, width: int, max_edge: int, patch: int) -> Size:
    """Return a size with sides of at most `max_edge`, by the rule of Pixtral's image processor."""
    ratio = max(height, width) / max_edge
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return max(1, math.ceil(height / patch)) * patch, max(1, math.ceil(width / patch)) * patch


def _filling(height: int, width: int, max_pixels: int, patch: int) -> Size:
    """Return a size of nearly `max_pixels`, by the rule of Gemma 4's image processor."""
    factor = math.sqrt(max_pixels / (height * width))
    rows, columns = math.floor(factor * height / patch), math.floor(factor * width / patch)
    longest = max_pixels // patch**2
    if not rows:
        rows, columns = 1, min(width // height, longest)
    elif not columns:
        rows, columns = min(height // width, longest), 1
    return rows * patch, columns * patch


def shortest_edge_size(height: int, width: int, edge: int) -> Size:
    """Return a size whose shorter side is `edge`. Raises AspectRatioError."""
    check_ratio(height, width)
    long = int(edge * max(height, width) / min(height, width))
    return (long, edge) if width <= height else (edge, long)


def longest_edge_size(height: int, width: int, edge: int) -> Size:
    """Return a size whose longer side is `edge`, and the other one even, by the rule of Idefics3's image processor."""
    if width >= height:
        other = int(edge / (width / height))
        return max(1, other + other % 2), edge
    other = int(edge * (width / height))
    return edge, max(1, other + other % 2)


def size_within(height: int, width: int, bounds: Size) -> Size:
    """Return the largest size of an image within bounds, as LLaVA-OneVision's image processor has it."""
    across, along = bounds[1] / width, bounds[0] / height
    if across < along:
        return min(math.ceil(height * across), bounds[0]), bounds[1]
    return bounds[0], min(math.ceil(width * along), bounds[1])


def whole_tiles(height: int, width: int, tile: int) -> Size:
    """Return the rows and columns of tiles that an image of this size is resized to, as Idefics3's processor has it."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return math.ceil(int(columns * tile / ratio) / tile), columns
    rows = math.ceil(height / tile)
    return rows, math.ceil(int(rows * tile * ratio) / tile)


def aspect_grid(height: int, width: int, size: AspectTiles) -> Size:
    """Return the rows and columns of tiles whose aspect ratio is nearest an image's.

    Of equal ones it is the largest whose area is less than twice the image's, as in InternVL's image processor.
    """
    counts = range(1, size.max_tiles + 1)
    grids = [(rows, columns) for columns in counts for rows in counts]
    fitting = [grid for grid in grids if size.min_tiles <= math.prod(grid) <= size.max_tiles]
    best, least = (1, 1), math.inf
    for rows, columns in sorted(fitting, key=math.prod):
        difference = abs(width / height - columns / rows)
        small = height * width > 0.5 * size.tile * size.tile * rows * columns
        if difference < least or (difference == least and small):
            best, least = (rows, columns), difference
    return best


def canvas_grid(height: int, width: int, size: CanvasTiles) -> Size:
    """Return the rows and columns of tiles of the canvas that enlarges an image least, or else shrinks it least.

    Of equal ones it is the first of the least area, as in Llama 4's image processor, which computes in float32.
    """
    by_ratio: dict[float, list[Size]] = {}
    for count in range(size.max_tiles, 0, -1):
        for rows in range(1, count + 1):
            if count % rows == 0:
                by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
    scales = {
        grid: min(_divided(side * size.tile, own) for side, own in zip(grid, (height, width), strict=True))
        for same in by_ratio.values()
        for grid in same
    }
    best = min((scale for scale in scales.values() if scale >= 1), default=max(scales.values()))
    return min((grid for grid, scale in scales.items() if scale == best), key=math.prod)


def canvas_size(height: int, width: int, canvas: Size, tile: int) -> Size:
    """Return the size of an image on a canvas: only one that is smaller than a tile is enlarged.

    Where the canvas bounds a side, Llama 4's image processor computes in float32.
    """
    bounded = [max(own, tile) > most for own, most in zip((height, width), canvas, strict=True)]
    bounds = [min(max(own, tile), most) for own, most in zip((height, width), canvas, strict=True)]
    down, across = (
        _divided(bound, own) if single else bound / own
        for bound, own, single in zip(bounds, (height, width), bounded, strict=True)
    )
    if (_single(across) < _single(down)) if any(bounded) else across < down:
        scaled = _single(_single(height) * across) if bounded[1] else height * across
        return max(1, min(math.floor(scaled), bounds[0])), bounds[1]
    scaled = _single(_single(width) * down) if bounded[0] else width * down
    return bounds[0], max(1, min(math.floor(scaled), bounds[1]))


def _divided(a: int, b: int) -> float:
    """Return a quotient in float32."""
    return _single(_single(a) / _single(b))


def _single(number: float) -> float:
    """Return the nearest float32."""
    [rounded] = struct.unpack("f", struct.pack("f", number))
    return float(rounded)
