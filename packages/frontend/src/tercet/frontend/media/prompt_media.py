"""Images, clips or sounds of prompts: their decoding, their texts and their places."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tercet.frontend.media.audio_decoder import AudioDecoder
from tercet.frontend.media.image_decoder import DecodedImage, ImageDecoder, ImageSource
from tercet.frontend.media.sound_decoder import DecodedSound, SoundDecoder, SoundSource
from tercet.frontend.media.video.decoder import DecodedGroup, DecodedVideo, VideoDecoder, VideoSource
from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.media import ImageFormat, ImageInput
from tercet.protocol.messages.values import ModelLimits
from tercet.protocol.messages.video import VideoFormat

Source = ImageSource | SoundSource | VideoSource
Decoded = DecodedImage | DecodedSound | DecodedVideo
Place = ImageInput | SoundInput
Form = ImageFormat | SoundFormat
AnyForm = Form | VideoFormat


class Decoders(Protocol):
    """Holder of the decoders of a frontend."""

    images: ImageDecoder
    audio: AudioDecoder
    videos: VideoDecoder


class Piece(NamedTuple):
    """Image, sound, or group of frames of a clip, which has one array."""

    decoded: DecodedImage | DecodedSound | DecodedGroup
    token_id: int
    """Its placeholder token."""
    embeddings: int
    frames: int = 0
    """Frames of a group."""
    begins: bool = True
    """It is not a further group of a clip whose groups follow each other."""
    joined: bool = False
    """It is a group of such a clip."""


def form_of(limits: ModelLimits) -> Form | None:
    """Return the form of a model's images or sounds; None if it takes neither."""
    return limits.sounds if limits.images is None else limits.images


def form_for(source: Source, sources: Sequence[Source], limits: ModelLimits) -> AnyForm:
    """Return the form of one of the images, clips or sounds of a prompt, which `check_images` has passed."""
    form = limits.video if isinstance(source, VideoSource) else form_of(limits)
    assert form is not None
    if isinstance(form, ImageFormat):
        return form.among(sum(isinstance(each, ImageSource) for each in sources))
    return form


def content_of(source: Source) -> str:
    """Return the URL of an image or a clip, or the file of a sound in base64."""
    return source.base64 if isinstance(source, SoundSource) else source.url


def bytes_of(decoded: Decoded) -> int:
    """Return the size of the arrays."""
    arrays = [group.array for group in decoded.groups] if isinstance(decoded, DecodedVideo) else [decoded.array]
    return sum(map(len, arrays))


async def decode(decoders: Decoders, source: Source, form: AnyForm) -> Decoded:
    """Return what a model takes. Raises ApiError."""
    if isinstance(source, VideoSource):
        assert isinstance(form, VideoFormat)
        return await decoders.videos.decode(source, form)
    if isinstance(source, ImageSource):
        assert isinstance(form, ImageFormat)
        return await decoders.images.decode(source, form)
    assert isinstance(form, SoundFormat)
    return await SoundDecoder(decoders.audio).decode(source, form)


def replacements_of(images: Sequence[Decoded], limits: ModelLimits) -> dict[str, list[str]]:
    """Return the texts that take the places of markers before tokenization, by marker."""
    texts: dict[str, list[str]] = {}
    for decoded in images:
        own: AnyForm | None = limits.video if isinstance(decoded, DecodedVideo) else form_of(limits)
        assert own is not None
        texts.setdefault(own.marker, []).append(replacement_of(decoded, own))
    return texts


def replacement_of(decoded: Decoded, form: AnyForm) -> str:
    """Return the text that takes the place of the marker before tokenization."""
    if isinstance(decoded, DecodedVideo):
        assert isinstance(form, VideoFormat)
        first = decoded.groups[0]
        return form.replacement(first.height, first.width, [group.seconds for group in decoded.groups])
    if isinstance(decoded, DecodedImage):
        assert isinstance(form, ImageFormat)
        return form.replacement(decoded.height, decoded.width, decoded.grid, decoded.original)
    assert isinstance(form, SoundFormat)
    return form.token * form.embeddings(decoded.samples)


def pieces_of(decoded: Decoded, form: Form | None, video: VideoFormat | None) -> list[Piece]:
    """Return what the arrays of an image, a clip or a sound have."""
    if isinstance(decoded, DecodedVideo):
        assert video is not None
        joined, frames = not video.stamp, video.frames
        counts = [video.embeddings(group.height, group.width) for group in decoded.groups]
        return [
            Piece(group, video.token_id, count, frames, begins=not (joined and number), joined=joined)
            for number, (group, count) in enumerate(zip(decoded.groups, counts, strict=True))
        ]
    if isinstance(decoded, DecodedImage):
        assert isinstance(form, ImageFormat)
        count = form.embeddings(decoded.height, decoded.width, decoded.original)
        return [Piece(decoded, form.token_id, count)]
    assert isinstance(form, SoundFormat)
    return [Piece(decoded, form.token_id, form.embeddings(decoded.samples))]


def place_of(piece: Piece, first: int, tokens: int, clip: int) -> Place:
    """Return the part of a message beside the array. `clip` is the first token of the clip of a group."""
    decoded = piece.decoded
    if isinstance(decoded, DecodedSound):
        return SoundInput(sha256=decoded.sha256, samples=decoded.samples, first=first, tokens=tokens)
    return ImageInput(
        sha256=decoded.sha256,
        height=decoded.height,
        width=decoded.width,
        first=first,
        tokens=tokens,
        original=decoded.original if isinstance(decoded, DecodedImage) else (),
        frames=piece.frames,
        clip=clip if piece.joined else -1,
        time=decoded.time if piece.joined and isinstance(decoded, DecodedGroup) else 0,
    )
