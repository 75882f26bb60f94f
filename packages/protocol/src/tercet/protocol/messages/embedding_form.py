"""Form of the embeddings that travel from a scheduler with the tower to one with the language model. Since 1.1."""

import msgspec

from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.media import ImageFormat, ImageInput

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EmbeddingForm(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the embeddings of an image or a sound: a raw frame [embeddings, width], little-endian.

    A language model takes those of an encoder with an equal form alone.
    """

    width: int
    """Numbers of one embedding, with those of further layers (deepstack)."""
    dtype: str
    """float32, bfloat16 or float16."""
    tower: str
    """Fingerprint of the model's files: equal ones have equal towers."""
    images: ImageFormat | None = None
    """Form of the images that are encoded."""
    sounds: SoundFormat | None = None
    """Form of the sounds that are encoded, by a model without images."""

    def embeddings(self, media: ImageInput | SoundInput) -> int:
        """Return the number of embeddings of an image or a sound; 0 for a kind or a size that is not encoded."""
        if isinstance(media, ImageInput):
            size = media.height, media.width, media.original
            return self.images.embeddings(*size) if self.images is not None and self.images.fits(*size) else 0
        if self.sounds is None or not self.sounds.fits(media.samples):
            return 0
        return self.sounds.embeddings(media.samples)

    def frame_bytes(self, embeddings: int) -> int:
        """Return the size of so many embeddings in bytes. Raises KeyError for another dtype."""
        return embeddings * self.width * _ITEM_BYTES[self.dtype]
