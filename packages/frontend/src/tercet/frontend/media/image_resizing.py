"""Images as the arrays that models take: resized, cropped, or cut into tiles."""

from itertools import product

from PIL import Image

from tercet.frontend.media.image_sizes import (
    Size,
    array_size,
    aspect_grid,
    longest_edge_size,
    shortest_edge_size,
    whole_tiles,
)
from tercet.protocol.messages.media import AspectTiles, CenterCrop, EdgeTiles, ImageSize

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
        case _:
            return _resized(image, array_size(image.height, image.width, size, patch), resample), _ONE_PIECE


def _resized(image: Image.Image, size: Size, resample: int) -> Image.Image:
    return image.resize((size[1], size[0]), Image.Resampling(resample))


def _tiled(image: Image.Image, grid: Size, tile: int, resample: int) -> tuple[Image.Image, Size]:
    """Return the tiles of an image one below another, and a thumbnail below them if there are several."""
    rows, columns = grid
    whole = _resized(image, (rows * tile, columns * tile), resample)
    if grid == (1, 1):
        return whole, _ONE_PIECE
    stack = Image.new("RGB", (tile, (rows * columns + 1) * tile))
    for number, (row, column) in enumerate(product(range(rows), range(columns))):
        left, top = column * tile, row * tile
        stack.paste(whole.crop((left, top, left + tile, top + tile)), (0, number * tile))
    stack.paste(_resized(image, (tile, tile), resample), (0, rows * columns * tile))
    return stack, grid
