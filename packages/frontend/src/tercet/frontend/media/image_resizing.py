"""Images as the arrays that models take: resized, cropped, or cut into tiles."""

from collections.abc import Sequence
from itertools import product

from PIL import Image

from tercet.frontend.media.image_sizes import (
    Size,
    array_size,
    aspect_grid,
    canvas_grid,
    canvas_size,
    check_ratio,
    longest_edge_size,
    shortest_edge_size,
    size_within,
    whole_tiles,
)
from tercet.protocol.messages.any_resolution import AnyResolution, PaddedSquare
from tercet.protocol.messages.media import AspectTiles, CanvasTiles, CenterCrop, EdgeTiles, ImageSize

_ONE_PIECE = 0, 0


def arranged(image: Image.Image, size: ImageSize, patch: int, resample: int) -> tuple[Image.Image, Size]:
    """Return an image as its array has it, and the rows and columns of its tiles; (0, 0) for one in one piece.

    Raises AspectRatioError.
    """
    match size:
        case CenterCrop():
            whole = _resized(image, shortest_edge_size(image.height, image.width, size.shortest_edge), resample)
            top, left = (whole.height - size.height) // 2, (whole.width - size.width) // 2
            return whole.crop((left, top, left + size.width, top + size.height)), _ONE_PIECE
        case AspectTiles():
            return _tiled(image, aspect_grid(image.height, image.width, size), size.tile, resample)
        case EdgeTiles():
            near = _resized(image, longest_edge_size(image.height, image.width, size.longest_edge), resample)
            grid = rows, columns = whole_tiles(near.height, near.width, size.tile)
            whole = _resized(near, (rows * size.tile, columns * size.tile), resample)
            return _tiled(whole, grid, size.tile, resample)
        case CanvasTiles():
            grid = rows, columns = canvas_grid(image.height, image.width, size)
            canvas = rows * size.tile, columns * size.tile
            near = _resized(image, canvas_size(image.height, image.width, canvas, size.tile), resample)
            whole = Image.new("RGB", (canvas[1], canvas[0]))
            whole.paste(near)
            return _cut(whole, grid, size.tile, _resized(image, (size.tile, size.tile), resample))
        case AnyResolution():
            return _within(image, size, resample), _ONE_PIECE
        case PaddedSquare():
            return _resized(_squared(image, size), (size.side, size.side), resample), _ONE_PIECE
        case _:
            return _resized(image, array_size(image.height, image.width, size, patch), resample), _ONE_PIECE


def _resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    return image.resize((size[1], size[0]), Image.Resampling(resample))


def _tiled(image: Image.Image, grid: Size, tile: int, resample: int) -> tuple[Image.Image, Size]:
    """Return the tiles of an image that is resized to whole ones, and its thumbnail. See `_cut`."""
    rows, columns = grid
    whole = _resized(image, (rows * tile, columns * tile), resample)
    return _cut(whole, grid, tile, _resized(image, (tile, tile), resample))


def _cut(whole: Image.Image, grid: Size, tile: int, thumbnail: Image.Image) -> tuple[Image.Image, Size]:
    """Return the tiles of an image one below another, and its thumbnail below them if there are several."""
    if grid == (1, 1):
        return whole, _ONE_PIECE
    return _stacked([*_tiles(whole, tile), thumbnail], tile), grid


def _tiles(whole: Image.Image, tile: int) -> list[Image.Image]:
    """Return the square tiles of an image, row by row."""
    places = product(range(0, whole.height, tile), range(0, whole.width, tile))
    return [whole.crop((left, top, left + tile, top + tile)) for top, left in places]


def _stacked(tiles: Sequence[Image.Image], tile: int) -> Image.Image:
    """Return square tiles one below another."""
    stack = Image.new("RGB", (tile, len(tiles) * tile))
    for number, each in enumerate(tiles):
        stack.paste(each, (0, number * tile))
    return stack


def _within(image: Image.Image, size: AnyResolution, resample: int) -> Image.Image:
    """Return the whole image as a tile, and below it the tiles of the image in the middle of its best size."""
    best = size.best(image.height, image.width)
    near = _resized(image, size_within(image.height, image.width, best), resample)
    whole = Image.new("RGB", (best[1], best[0]))
    whole.paste(near, ((best[1] - near.width) // 2, (best[0] - near.height) // 2))
    return _stacked([_resized(image, (size.tile, size.tile), resample), *_tiles(whole, size.tile)], size.tile)


def _squared(image: Image.Image, size: PaddedSquare) -> Image.Image:
    """Return an image in the middle of a square. Raises AspectRatioError."""
    check_ratio(image.height, image.width)
    side = max(image.size)
    square = Image.new("RGB", (side, side), size.background)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
