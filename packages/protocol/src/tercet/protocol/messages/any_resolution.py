"""Images at any resolution (LLaVA-OneVision): tiles in the grid that suits an image, and embeddings without margins."""

import math

import msgspec

_LONGEST_SIDE = 1 << 31
_MOST_ABOVE = 1.1
"""Ratio of sides up to which embeddings may exceed those of `max_tiles` tiles."""


class AnyResolution(msgspec.Struct, frozen=True, kw_only=True, tag="any_resolution"):
    """Square tiles: one of the whole image, then those of the image in the middle of the best of `sizes`, row by row.

    They are one below another in the array. Margins are black, and their embeddings are left out. Each row of
    embeddings of the tiles after the first ends with one more, that of a new line.
    """

    tile: int
    """Pixels of a side."""
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths, multiples of `tile`."""
    max_tiles: int
    """Embeddings beyond those of about so many tiles are interpolated to fewer."""

    def fits(self, height: int, width: int, original: tuple[int, ...]) -> bool:
        """Return whether an array of this size may be that of an image that had the size `original`."""
        if len(original) != 2 or not all(0 < side < _LONGEST_SIDE for side in original):
            return False
        rows, columns = self.grid(*original)
        return (height, width) == ((rows * columns + 1) * self.tile, self.tile)

    def best(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that shows most pixels of an image, and of equal ones the first with the least margins."""

        def rank(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            return shown, shown - size[0] * size[1]

        return max(self.sizes, key=rank)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of the best size."""
        rows, columns = self.best(height, width)
        return rows // self.tile, columns // self.tile

    def inner(self, height: int, width: int, side: int) -> tuple[int, int]:
        """Return the rows and columns of embeddings between the margins, for tiles of `side` x `side` embeddings."""
        rows, columns = (count * side for count in self.grid(height, width))
        if width / height > columns / rows:
            margin = (rows - int(round(height * (columns / width), 7))) // 2
            return rows - 2 * margin, columns
        margin = (columns - int(round(width * (rows / height), 7))) // 2
        return rows, columns - 2 * margin

    def kept(self, height: int, width: int, side: int) -> tuple[int, int]:
        """Return the rows and columns of embeddings that are left of `inner` ones."""
        rows, columns = self.inner(height, width, side)
        ratio = math.sqrt(rows * columns / (self.max_tiles * side**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > _MOST_ABOVE else (rows, columns)

    def embeddings(self, height: int, width: int, side: int) -> int:
        """Return the number of embeddings of an image of this size."""
        rows, columns = self.kept(height, width, side)
        return side**2 + rows * (columns + 1)

    def most_embeddings(self, side: int) -> int:
        """Return the maximum number of embeddings of an image."""
        most = int(_MOST_ABOVE**2 * self.max_tiles * side**2)
        counts = [(height // self.tile * side, width // self.tile * side) for height, width in self.sizes]
        return side**2 + max(min(rows * columns, most) + rows for rows, columns in counts)


class PaddedSquare(msgspec.Struct, frozen=True, kw_only=True, tag="padded_square"):
    """Fixed size of the image in the middle of a square of one color. One embedding, that of a new line, follows."""

    side: int
    background: tuple[int, int, int]
    """Red, green and blue of the margins."""
