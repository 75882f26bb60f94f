"""Images in requests: the form in which a model takes them, and the place of each in a prompt. Since 1.1."""

import msgspec


class ImageFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the images that a model takes: arrays uint8 [height, width, 3], all of one size.

    `resample` is the number of the filter in Pillow. Images are resized to that size.
    """

    height: int
    width: int
    resample: int
    marker: str
    """Text that the chat template writes for an image."""
    replacement: str
    """Text that takes the place of the marker before tokenization, with `tokens` placeholder tokens in a row."""
    token_id: int
    """Id of a placeholder token."""
    tokens: int
    """Placeholder tokens of each image, in whose place the model gets its embeddings."""

    @property
    def array_bytes(self) -> int:
        """Return the size of an array in bytes."""
        return 3 * self.height * self.width


class ImageInput(msgspec.Struct, frozen=True, kw_only=True):
    """Image in a prompt, whose array is a raw frame of the message."""

    sha256: bytes
    """Hash of the array, 32 bytes."""
    first: int
    """Index of its first placeholder token in the prompt."""
    tokens: int
