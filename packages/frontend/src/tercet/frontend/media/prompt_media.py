"""Images or sounds of prompts: their decoding, their texts and their places."""

from typing import Protocol

from tercet.frontend.media.audio_decoder import AudioDecoder
from tercet.frontend.media.image_decoder import DecodedImage, ImageDecoder, ImageSource
from tercet.frontend.media.sound_decoder import DecodedSound, SoundDecoder, SoundSource
from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.values import ModelLimits

Source = ImageSource | SoundSource
Decoded = DecodedImage | DecodedSound
Place = ImageInput | SoundInput
Form = ImageFormat | SoundFormat


class Decoders(Protocol):
    """Holder of the decoders of a frontend."""

    images: ImageDecoder
    audio: AudioDecoder


def form_of(limits: ModelLimits) -> Form | None:
    """Return the form of a model's images or sounds; None if it takes neither."""
    return limits.sounds if limits.images is None else limits.images


def form_among(form: Form, count: int) -> Form:
    """Return the form of the images of a prompt that has so many."""
    return form.among(count) if isinstance(form, ImageFormat) else form


def content_of(source: Source) -> str:
    """Return the URL of an image, or the file of a sound in base64."""
    return source.url if isinstance(source, ImageSource) else source.base64


async def decode(decoders: Decoders, source: Source, form: Form) -> Decoded:
    """Return what a model takes. Raises ApiError."""
    if isinstance(source, ImageSource):
        assert isinstance(form, ImageFormat)
        return await decoders.images.decode(source, form)
    assert isinstance(form, SoundFormat)
    return await SoundDecoder(decoders.audio).decode(source, form)


def replacement_of(decoded: Decoded, form: Form) -> str:
    """Return the text that takes the place of the marker before tokenization."""
    if isinstance(decoded, DecodedImage):
        assert isinstance(form, ImageFormat)
        return form.replacement(decoded.height, decoded.width, decoded.grid, decoded.original)
    return form.token * embeddings_of(decoded, form)


def embeddings_of(decoded: Decoded, form: Form) -> int:
    """Return the number of placeholder tokens."""
    if isinstance(decoded, DecodedImage):
        assert isinstance(form, ImageFormat)
        return form.embeddings(decoded.height, decoded.width, decoded.original)
    assert isinstance(form, SoundFormat)
    return form.embeddings(decoded.samples)


def place_of(decoded: Decoded, first: int, tokens: int) -> Place:
    """Return the part of a message beside the array."""
    if isinstance(decoded, DecodedSound):
        return SoundInput(sha256=decoded.sha256, samples=decoded.samples, first=first, tokens=tokens)
    return ImageInput(
        sha256=decoded.sha256,
        height=decoded.height,
        width=decoded.width,
        first=first,
        tokens=tokens,
        original=decoded.original,
    )
