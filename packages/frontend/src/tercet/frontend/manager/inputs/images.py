"""Images of prompts, decoded, with their places among the tokens."""

import asyncio
from collections.abc import Sequence
from itertools import islice

import msgspec

from tercet.frontend.errors import BadRequestError, ServerError
from tercet.frontend.media.image_decoder import DecodedImage, ImageDecoder, ImageSource
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.media import ImageFormat, ImageInput

_AT_ONCE = 4
MAX_ARRAY_BYTES = 268_435_456
"""Maximum bytes of the different arrays of a request, which its frontend holds until it ends."""


class PlacedImage(msgspec.Struct, frozen=True):
    """Image with its place in a prompt, and its array."""

    place: ImageInput
    array: bytes


async def tokenize(decoder: ImageDecoder, prompt: Prompt, model: ServedModel) -> list[int]:
    """Return the token ids of a prompt of any length with its images. Raises ApiError."""
    [images] = await decoded_images(decoder, [prompt], model)
    return await model.tokenize(prompt, images, must_fit=False)


async def tokenize_all(
    decoder: ImageDecoder, prompts: Sequence[Prompt], model: ServedModel
) -> tuple[list[list[int]], list[list[DecodedImage]]]:
    """Return the token ids and the images of the prompts of one request. Raises ApiError."""
    images = await decoded_images(decoder, prompts, model)
    return await model.tokenize_all(prompts, images), images


async def decoded_images(
    decoder: ImageDecoder, prompts: Sequence[Prompt], model: ServedModel
) -> list[list[DecodedImage]]:
    """Decode the images of each prompt, each URL once. Raises ApiError."""
    form = model.limits.images
    sources = [[] if form is None or isinstance(prompt, TokenPrompt) else [*prompt.images] for prompt in prompts]
    if form is None or not any(sources):
        return [[] for _ in prompts]
    decoded = await _decoded(decoder, [source for own in sources for source in own], form)
    return [[decoded[source.url] for source in own] for own in sources]


async def _decoded(decoder: ImageDecoder, sources: Sequence[ImageSource], form: ImageFormat) -> dict[str, DecodedImage]:
    """Return images by URL. At most `_AT_ONCE` are decoded at a time, so that one request fills no queue."""
    slots = asyncio.Semaphore(_AT_ONCE)
    held = 0

    async def decode(source: ImageSource) -> DecodedImage:
        nonlocal held
        async with slots:
            image = await decoder.decode(source, form)
        held += len(image.array)
        if held > MAX_ARRAY_BYTES:
            message = f"The images of a request take more than {MAX_ARRAY_BYTES} bytes as the model's arrays."
            raise BadRequestError(message, param=source.param, code="invalid_image")
        return image

    tasks: dict[str, asyncio.Task[DecodedImage]] = {}
    for source in sources:
        if source.url not in tasks:
            tasks[source.url] = asyncio.create_task(decode(source))
    try:
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()


def placed_images(
    images: Sequence[DecodedImage], prompt: Prompt, ids: Sequence[int], form: ImageFormat | None
) -> list[PlacedImage]:
    """Find the place of each image in a prompt with these token ids. Raises ApiError for another number of them."""
    if form is None or not images:
        return []
    counts = [form.embeddings(image.height, image.width) for image in images]
    places = [place for place, token in enumerate(ids) if token == form.token_id]
    if len(places) != sum(counts):
        if isinstance(prompt, ChatPrompt):
            raise ServerError("The tokenizer has no placeholder tokens for images.")
        raise BadRequestError(f"The text writes tokens of images besides {form.marker!r}.", param=prompt.param)
    rest = iter(places)
    return [_placed(image, list(islice(rest, count))) for image, count in zip(images, counts, strict=True)]


def _placed(image: DecodedImage, places: Sequence[int]) -> PlacedImage:
    first, last = places[0], places[-1]
    place = ImageInput(
        sha256=image.sha256, height=image.height, width=image.width, first=first, tokens=last - first + 1
    )
    return PlacedImage(place, image.array)
