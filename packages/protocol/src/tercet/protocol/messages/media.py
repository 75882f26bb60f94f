"""Images in requests: the form in which a model takes them, and the place of each in a prompt. Since 1.1."""

import msgspec

from tercet.protocol.messages.any_resolution import AnyResolution, PaddedSquare


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


class CanvasTiles(msgspec.Struct, frozen=True, kw_only=True, tag="canvas_tiles"):
    """Square tiles, at most `max_tiles`, of an image at the top left of the black canvas that shrinks it least.

    They are in the array as those of `AspectTiles`.
    """

    tile: int
    max_tiles: int


ImageSize = (
    FixedSize
    | PixelRange
    | LongestEdge
    | FilledPixels
    | CenterCrop
    | AspectTiles
    | EdgeTiles
    | CanvasTiles
    | AnyResolution
    | PaddedSquare
)


class TileTexts(msgspec.Struct, frozen=True, kw_only=True):
    """Texts around the tiles of an image that is cut into several, in the place of its prefix."""

    tile: str
    """Text before each tile. `{row}` and `{column}` stand for its place, from 1."""
    row_break: str
    """Text between the rows of tiles."""
    thumbnail: str
    """Text between the last tile and the thumbnail."""
    column_break: str = ""
    """Text between the tiles of a row."""
    prefix: str = ""
    """Text before the first tile."""


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
    several: PaddedSquare | None = None
    """Size of each image of a prompt that has several; None if it is `size`."""

    def among(self, count: int) -> "ImageFormat":
        """Return the form of the images of a prompt that has so many."""
        return self if self.several is None or count == 1 else msgspec.structs.replace(self, size=self.several)

    def replacement(
        self, height: int, width: int, grid: tuple[int, int] = (0, 0), original: tuple[int, ...] = ()
    ) -> str:
        """Return the text that takes the place of the marker before tokenization.

        `grid` has the rows and columns of tiles of an image that is cut into several, and `original` is that of
        `ImageInput`.
        """
        rows, columns = grid
        if self.tiles is not None and rows:
            tile = self.token * (self.embeddings(height, width) // (rows * columns + 1))
            lines = [
                self.tiles.column_break.join(
                    self.tiles.tile.format(row=row + 1, column=column + 1) + tile for column in range(columns)
                )
                for row in range(rows)
            ]
            body = self.tiles.row_break.join(lines)
            return f"{self.tiles.prefix}{body}{self.tiles.thumbnail}{tile}{self.suffix}"
        count = self.embeddings(height, width, original)
        columns = width // self.patch if self.row_break else count
        return f"{self.prefix}{self.row_break.join([self.token * columns] * (count // columns))}{self.suffix}"

    def fits(self, height: int, width: int, original: tuple[int, ...] = ()) -> bool:
        """Return whether an array of this size may be an image's. `original` is that of `ImageInput`."""
        size = self._size(original)
        if isinstance(size, AnyResolution):
            return size.fits(height, width, original)
        return not original and self._fits(size, height, width)

    def _size(self, original: tuple[int, ...]) -> ImageSize:
        """Return the size of an image, which has no `original` among several."""
        return self.size if self.several is None or original else self.several

    def _fits(self, size: ImageSize, height: int, width: int) -> bool:
        match size:
            case AnyResolution():
                return False
            case PaddedSquare():
                return height == width == size.side
            case FixedSize() | CenterCrop() as fixed:
                return (height, width) == (fixed.height, fixed.width)
            case AspectTiles() | EdgeTiles() | CanvasTiles() as tiles:
                return width == tiles.tile and height > 0 and height % tiles.tile == 0
            case PixelRange() | LongestEdge() | FilledPixels():
                return all(side > 0 and side % self.patch == 0 for side in (height, width))

    def embeddings(self, height: int, width: int, original: tuple[int, ...] = ()) -> int:
        """Return the number of embeddings, and so of placeholder tokens, of an image."""
        match self._size(original):
            case AnyResolution() as size:
                tall, wide = original
                return size.embeddings(tall, wide, size.tile // self.patch)
            case AspectTiles() | EdgeTiles() | CanvasTiles() as size:
                return height // size.tile * (size.tile // self.patch) ** 2
            case PaddedSquare() as size:
                return (size.side // self.patch) ** 2 + 1
            case _:
                return (height // self.patch) * (width // self.patch)


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """Image in a prompt, or a group of frames of a clip, whose array is a raw frame of the message."""

    sha256: bytes
    """Hash of the array and its size, 32 bytes."""
    height: int
    width: int
    first: int
    """Index of its first placeholder token in the prompt."""
    tokens: int
    """Tokens from its first to its last placeholder token."""
    original: tuple[int, ...] = ()
    """Height and width before it was resized, of an image in `AnyResolution`, whose embeddings depend on them."""
    frames: int = 0
    """Frames of a group; 0 for an image."""
    clip: int = -1
    """First token of the clip of a group whose position depends on the groups before it; -1 for any other one."""
    time: int = 0
    """Position of such a group relative to the first one of its clip."""

    @property
    def array_bytes(self) -> int:
        """Return the size of the array in bytes."""
        return 3 * self.height * self.width * max(self.frames, 1)
