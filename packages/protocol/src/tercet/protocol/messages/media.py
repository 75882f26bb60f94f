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


ImageSize = FixedSize | PixelRange | LongestEdge


class ImageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the images that a model takes: arrays uint8 [height, width, 3].

    `size` has the size of an image's array. Both sides are multiples of `patch`, and each square of `patch` pixels has
    one placeholder token, in whose place the model gets an embedding. `resample` is the number of the filter in Pillow.
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

    def replacement(self, height: int, width: int) -> str:
        """Return the text that takes the place of the marker before tokenization."""
        row = self.token * (width // self.patch)
        return f"{self.prefix}{self.row_break.join([row] * (height // self.patch))}{self.suffix}"

    def embeddings(self, height: int, width: int) -> int:
        """Return the number of embeddings, and so of placeholder tokens, of an image."""
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
