"""Images or sounds of prompts, decoded, with their places among the tokens."""

import asyncio
from collections.abc import Sequence
from itertools import islice

import msgspec

from tercet.frontend.errors import BadRequestError, ServerError
from tercet.frontend.media.prompt_media import (
    Decoded,
    Decoders,
    Form,
    Place,
    Source,
    content_of,
    decode,
    embeddings_of,
    form_among,
    form_of,
    place_of,
)
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.audio import SoundInput
from tercet.protocol.messages.codec import Frame
from tercet.protocol.messages.media import ImageFormat, ImageInput

_AT_ONCE = 4
MAX_ARRAY_BYTES = 268_435_456
"""Maximum bytes of the different arrays of a request, which its frontend holds until it ends."""


class PlacedImage(msgspec.Struct, frozen=True):
    """Image or sound with its place in a prompt."""

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
    """Decode the images or sounds of each prompt, each URL or file once. Raises ApiError."""
    form = form_of(model.limits)
    sources = [[] if form is None or isinstance(prompt, TokenPrompt) else [*prompt.images] for prompt in prompts]
    if form is None or not any(sources):
        return [[] for _ in prompts]
    orders = [[(source, form_among(form, len(own))) for source in own] for own in sources]
    decoded = await _decoded(decoders, [order for own in orders for order in own])
    return [[decoded[content_of(source), form] for source, form in own] for own in orders]


async def _decoded(decoders: Decoders, orders: Sequence[tuple[Source, Form]]) -> dict[tuple[str, Form], Decoded]:
    """Return images by URL and form, sounds by file.

    At most `_AT_ONCE` are decoded at a time, so that one request fills no queue.
    """
    slots = asyncio.Semaphore(_AT_ONCE)
    held = 0

    async def decode_next(source: Source, form: Form) -> Decoded:
        nonlocal held
        async with slots:
            image = await decode(decoders, source, form)
        held += len(image.array)
        if held > MAX_ARRAY_BYTES:
            message = f"The images of a request take more than {MAX_ARRAY_BYTES} bytes as the model's arrays."
            raise BadRequestError(message, param=source.param, code="invalid_image")
        return image

    tasks: dict[tuple[str, Form], asyncio.Task[Decoded]] = {}
    for source, form in orders:
        if (key := (content_of(source), form)) not in tasks:
            tasks[key] = asyncio.create_task(decode_next(source, form))
    try:
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()


def placed_images(
    images: Sequence[Decoded], prompt: Prompt, ids: Sequence[int], form: Form | None
) -> list[PlacedImage]:
    """Find the place of each image in a prompt with these token ids. Raises ApiError for another number of them."""
    if form is None or not images:
        return []
    counts = [embeddings_of(image, form) for image in images]
    places = [place for place, token in enumerate(ids) if token == form.token_id]
    if len(places) != sum(counts):
        noun = "images" if isinstance(form, ImageFormat) else "sounds"
        if isinstance(prompt, ChatPrompt):
            raise ServerError(f"The tokenizer has no placeholder tokens for {noun}.")
        raise BadRequestError(f"The text writes tokens of {noun} besides {form.marker!r}.", param=prompt.param)
    rest = iter(places)
    return [_placed(image, list(islice(rest, count))) for image, count in zip(images, counts, strict=True)]


def _placed(image: Decoded, places: Sequence[int]) -> PlacedImage:
    first, last = places[0], places[-1]
    return PlacedImage(place_of(image, first, last - first + 1), image.array)


def images_in(places: Sequence[Place]) -> list[ImageInput]:
    """Return the places of images."""
    return [place for place in places if isinstance(place, ImageInput)]


def sounds_in(places: Sequence[Place]) -> list[SoundInput]:
    """Return the places of sounds."""
    return [place for place in places if isinstance(place, SoundInput)]
