"""Images, clips or sounds of prompts, decoded, with their places among the tokens."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from tercet.frontend.errors import BadRequestError, ServerError
from tercet.frontend.media.prompt_media import (
    AnyForm,
    Decoded,
    Decoders,
    Form,
    Piece,
    Place,
    Source,
    bytes_of,
    content_of,
    decode,
    form_for,
    pieces_of,
    place_of,
)
from tercet.frontend.media.video.decoder import VideoSource
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.audio import SoundFormat, SoundInput
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.media import ImageInput
from tercet.protocol.messages.video import VideoFormat

_AT_ONCE = 4
_Key = tuple[str, AnyForm]
MAX_ARRAY_BYTES = 268_435_456
"""Maximum bytes of the different arrays of a request, which its frontend holds until it ends."""
MAX_ARRAYS = 1000
"""Maximum images and groups of frames of a prompt: a message has at most 1,024 frames."""


class PlacedImage(msgspec.Struct, frozen=True):
    """Image, group of frames or sound with its place in a prompt."""

    place: Place
    array: Frame
    """Its array, or its embeddings."""


async def tokenize(decoders: Decoders, prompt: Prompt, model: ServedModel) -> list[int]:
    """Return the token ids of a prompt of any length with its images. Raises ApiError."""
    [images] = await decoded_images(decoders, [prompt], model)
    return await model.tokenize(prompt, images, must_fit=False)


async def tokenize_all(
    decoders: Decoders, prompts: Sequence[Prompt], model: ServedModel
) -> tuple[list[list[int]], list[list[Decoded]]]:
    """Return the token ids and the images of the prompts of one request. Raises ApiError."""
    images = await decoded_images(decoders, prompts, model)
    return await model.tokenize_all(prompts, images), images


async def decoded_images(decoders: Decoders, prompts: Sequence[Prompt], model: ServedModel) -> list[list[Decoded]]:
    """Decode the images, clips or sounds of each prompt, each URL or file once. Raises ApiError."""
    sources = [[] if isinstance(prompt, TokenPrompt) else [*prompt.images] for prompt in prompts]
    if not any(sources):
        return [[] for _ in prompts]
    orders = [[(source, form_for(source, own, model.limits)) for source in own] for own in sources]
    decoded = await _decoded(decoders, [order for own in orders for order in own])
    return [[decoded[content_of(source), form] for source, form in own] for own in orders]


async def _decoded(decoders: Decoders, orders: Sequence[tuple[Source, AnyForm]]) -> dict[_Key, Decoded]:
    """Return images and clips by URL and form, sounds by file.

    At most `_AT_ONCE` are decoded at a time, so that one request fills no queue.
    """
    slots = asyncio.Semaphore(_AT_ONCE)
    held = 0

    async def decode_next(source: Source, form: AnyForm) -> Decoded:
        nonlocal held
        async with slots:
            image = await decode(decoders, source, form)
        held += bytes_of(image)
        if held > MAX_ARRAY_BYTES:
            noun, code = ("videos", "invalid_video") if isinstance(source, VideoSource) else ("images", "invalid_image")
            message = f"The {noun} of a request take more than {MAX_ARRAY_BYTES} bytes as the model's arrays."
            raise BadRequestError(message, param=source.param, code=code)
        return image

    tasks: dict[_Key, asyncio.Task[Decoded]] = {}
    for source, form in orders:
        if (key := (content_of(source), form)) not in tasks:
            tasks[key] = asyncio.create_task(decode_next(source, form))
    try:
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()


def placed_images(
    images: Sequence[Decoded],
    prompt: Prompt,
    ids: Sequence[int],
    form: Form | None,
    video: VideoFormat | None = None,
) -> list[PlacedImage]:
    """Find the place of each image in a prompt with these token ids. Raises ApiError for another number of them."""
    if not images:
        return []
    pieces = [piece for image in images for piece in pieces_of(image, form, video)]
    if len(pieces) > MAX_ARRAYS:
        message = f"The images and clips of a prompt have {len(pieces)} arrays, and at most {MAX_ARRAYS} are sent."
        raise BadRequestError(message, param=prompt.param, code="invalid_video")
    placed: list[PlacedImage] = []
    for token_id in {each.token_id for each in (form, video) if each is not None}:
        own = [piece for piece in pieces if piece.token_id == token_id]
        places = [place for place, token in enumerate(ids) if token == token_id]
        if len(places) != sum(piece.embeddings for piece in own):
            nouns = "sounds" if isinstance(form, SoundFormat) else "images" if video is None else "images or videos"
            if isinstance(prompt, ChatPrompt):
                raise ServerError(f"The tokenizer has no placeholder tokens for {nouns}.")
            markers = " and ".join(repr(each.marker) for each in (form, video) if each is not None)
            raise BadRequestError(f"The text writes tokens of {nouns} besides {markers}.", param=prompt.param)
        placed += _placed(own, iter(places))
    return sorted(placed, key=lambda each: each.place.first)


def _placed(pieces: Sequence[Piece], places: Iterator[int]) -> list[PlacedImage]:
    placed: list[PlacedImage] = []
    clip = 0
    for piece in pieces:
        own = list(islice(places, piece.embeddings))
        clip = own[0] if piece.begins else clip
        place = place_of(piece, own[0], own[-1] - own[0] + 1, clip)
        placed.append(PlacedImage(place, piece.decoded.array))
    return placed


def images_in(places: Sequence[Place]) -> list[ImageInput]:
    """Return the places of images and of groups of frames."""
    return [place for place in places if isinstance(place, ImageInput)]


def sounds_in(places: Sequence[Place]) -> list[SoundInput]:
    """Return the places of sounds."""
    return [place for place in places if isinstance(place, SoundInput)]
