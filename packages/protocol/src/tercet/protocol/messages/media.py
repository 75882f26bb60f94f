"""Images in requests: the form in which a model takes them, and the place of each in a prompt. Since 1.1."""

import msgspec


class FixedSize(msgspec.Struct, frozen=True, kw_only=True, tag="fixed"):
    """Fixed size of every image. The aspect ratio is not kept."""

    height: int
    width: int


class PixelRange(msgspec.Struct, frozen=True, kw_only=True, tag="pixels"):
    """Size near the image's own, with at least `min_pixels` and at most `max_pixels`."""

    min_pixels: int
    max_pixels: int


class LongestEdge(msgspec.Struct, frozen=True, kw_only=True, tag="longest_edge"):
    """Size of the image itself, or a smaller one with sides of at most `max_edge`, rounded up."""

    max_edge: int


class FilledPixels(msgspec.Struct, frozen=True, kw_only=True, tag="filled"):
    """Size of as many pixels as `max_pixels` allows, also for a smaller image."""

    max_pixels: int


class CenterCrop(msgspec.Struct, frozen=True, kw_only=True, tag="crop"):
    """Fixed size: the center of an image whose shorter side is resized to `shortest_edge`, with a black margin where it
    is too small.
    """

    shortest_edge: int
    height: int
    width: int


class AspectTiles(msgspec.Struct, frozen=True, kw_only=True, tag="aspect_tiles"):
    """Square tiles, `min_tiles` to `max_tiles`, in the grid whose aspect ratio is nearest the image's.

    Tiles are one below another in the array. If there are several, a thumbnail of the size of a tile follows them.
    """

    tile: int
    """Pixels of a side."""
    min_tiles: int
    max_tiles: int


class EdgeTiles(msgspec.Struct, frozen=True, kw_only=True, tag="edge_tiles"):
    """Square tiles of an image whose longer side is resized to `longest_edge`, and both sides then to whole tiles.

    They are in the array as those of `AspectTiles`.
    """

    tile: int
    longest_edge: int


ImageSize = FixedSize | PixelRange | LongestEdge | FilledPixels | CenterCrop | AspectTiles | EdgeTiles


class TileTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Texts around the tiles of an image that is cut into several, in the place of its prefix."""

    tile: str
    """Text before each tile. `{row}` and `{column}` stand for its place, from 1."""
    row_break: str
    """Text between the rows of tiles."""
    thumbnail: str
    """Text between the last tile and the thumbnail."""


class ImageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the images that a model takes: arrays uint8 [height, width, 3].

    `size` has the size of an image's array. Each whole square of `patch` pixels has one placeholder token, in whose
    place the model gets an embedding. `resample` is the number of the filter in Pillow.
    """

    size: ImageSize
    patch: int
    resample: int
    marker: str
    """Text that the chat template writes for an image."""
    token: str
    """Text of a placeholder token."""
    token_id: int
    max_tokens: int
    """Maximum tokens of an image, from its first to its last placeholder token."""
    prefix: str = ""
    suffix: str = ""
    """Texts around the placeholder tokens of an image."""
    row_break: str = ""
    """Text between the rows of an image."""
    tiles: TileTexts | None = None
    """Texts of an image that is cut into several tiles; None if they are like those of any other."""

    def replacement(self, height: int, width: int, grid: tuple[int, int] = (0, 0)) -> str:
        """Return the text that takes the place of the marker before tokenization.

        `grid` has the rows and columns of tiles of an image that is cut into several.
        """
        rows, columns = grid
        if self.tiles is not None and rows:
            tile = self.token * (self.embeddings(height, width) // (rows * columns + 1))
            lines = [
                "".join(self.tiles.tile.format(row=row + 1, column=column + 1) + tile for column in range(columns))
                for row in range(rows)
            ]
            return f"{self.tiles.row_break.join(lines)}{self.tiles.thumbnail}{tile}{self.suffix}"
        columns = width // self.patch
        lines = [self.token * columns] * (self.embeddings(height, width) // columns)
        return f"{self.prefix}{self.row_break.join(lines)}{self.suffix}"

    def fits(self, height: int, width: int) -> bool:
        """Return whether an array of this size may be an image's."""
        match self.size:
            case FixedSize() | CenterCrop() as fixed:
                return (height, width) == (fixed.height, fixed.width)
            case AspectTiles() | EdgeTiles() as tiles:
                return width == tiles.tile and height > 0 and height % tiles.tile == 0
            case PixelRange() | LongestEdge() | FilledPixels():
                return all(side > 0 and side % self.patch == 0 for side in (height, width))

    def embeddings(self, height: int, width: int) -> int:
        """Return the number of embeddings, and so of placeholder tokens, of an image."""
        if isinstance(self.size, AspectTiles | EdgeTiles):
            return height // self.size.tile * (self.size.tile // self.patch) ** 2
        return (height // self.patch) * (width // self.patch)


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """Image in a prompt, whose array is a raw frame of the message."""

    sha256: bytes
    """Hash of the array and its size, 32 bytes."""
    height: int
    width: int
    first: int
    """Index of its first placeholder token in the prompt."""
    tokens: int
    """Tokens from its first to its last placeholder token."""

    @property
    def array_bytes(self) -> int:
        """Return the size of the array in bytes."""
        return 3 * self.height * self.width
