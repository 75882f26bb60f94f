"""Form of the embeddings that travel from a scheduler with the tower to one with the language model. Since 1.1."""

import msgspec

from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.video import VideoFormat

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class EmbeddingForm(msgspec.Struct, frozen=True, kw_only=True):
    """Form of the embeddings of an image or a sound: a raw frame [embeddings, width], little-endian.

    A language model takes those of an encoder with such a form alone: see `encodes_for`.
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
    video: VideoFormat | None = None
    """Form of the clips that are encoded, a group of frames at a time."""

    def encodes_for(self, form: "EmbeddingForm") -> bool:
        """Return whether a language model with this form takes the embeddings: its clips may have other bounds."""
        video, other = self.video, form.video
        if video is not None and other is not None:
            bounds = {"sampling": other.sampling, "size": other.size, "max_tokens": other.max_tokens}
            video = msgspec.structs.replace(video, **bounds)
        return msgspec.structs.replace(self, video=video) == form

    def embeddings(self, media: ImageInput | SoundInput) -> int:
        """Return the number of embeddings of an image or a sound; 0 for a kind or a size that is not encoded."""
        if isinstance(media, SoundInput):
            sounds = self.sounds
            return 0 if sounds is None or not sounds.fits(media.samples) else sounds.embeddings(media.samples)
        size = media.height, media.width
        if media.frames:
            video = self.video
            taken = video is not None and media.frames == video.frames and not media.original and video.fits(*size)
            return video.embeddings(*size) if video is not None and taken else 0
        images = self.images
        taken = images is not None and images.fits(*size, media.original)
        return images.embeddings(*size, media.original) if images is not None and taken else 0

    def frame_bytes(self, embeddings: int) -> int:
        """Return the size of so many embeddings in bytes. Raises KeyError for another dtype."""
        return embeddings * self.width * _ITEM_BYTES[self.dtype]
