"""Images of prompts, decoded, with their places among the tokens."""

import asyncio
from collections.abc import Sequence

import msgspec

from tercet.frontend.errors import BadRequestError, ServerError
from tercet.frontend.media.decoder import DecodedImage, ImageDecoder, ImageSource
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.media import ImageFormat, ImageInput

_AT_ONCE = 4


class PlacedImage(msgspec.Struct, frozen=True):
    """Image with its place in a prompt, and its array."""

    place: ImageInput
    array: bytes


async def placed_images(
    decoder: ImageDecoder, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], model: ServedModel
) -> list[list[PlacedImage]]:
    """Decode the images of prompts with these token ids, each URL once. Raises ApiError."""
    form = model.limits.images
    sources = [[] if form is None or isinstance(prompt, TokenPrompt) else [*prompt.images] for prompt in prompts]
    if form is None or not any(sources):
        return [[] for _ in prompts]
    firsts = [
        _places(prompt, tokens, len(own), form) for prompt, tokens, own in zip(prompts, ids, sources, strict=True)
    ]
    decoded = await _decoded(decoder, [source for own in sources for source in own], form)
    return [
        [_placed(decoded[source.url], first, form) for source, first in zip(own, places, strict=True)]
        for own, places in zip(sources, firsts, strict=True)
    ]


def _places(prompt: Prompt, ids: Sequence[int], count: int, form: ImageFormat) -> list[int]:
    """Return the index of the first placeholder token of each image. Raises ApiError for another number of them."""
    firsts = [place for place, token in enumerate(ids) if token == form.token_id][:: form.tokens] if count else []
    if len(firsts) == count:
        return firsts
    if isinstance(prompt, ChatPrompt):
        raise ServerError("The tokenizer has no placeholder tokens for images.")
    raise BadRequestError(f"The text writes tokens of images besides {form.marker!r}.", param=prompt.param)


async def _decoded(decoder: ImageDecoder, sources: Sequence[ImageSource], form: ImageFormat) -> dict[str, DecodedImage]:
    """Return images by URL. At most `_AT_ONCE` are decoded at a time, so that one request fills no queue."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def decode(source: ImageSource) -> DecodedImage:
        async with slots:
            return await decoder.decode(source, form)

    tasks: dict[str, asyncio.Task[DecodedImage]] = {}
    for source in sources:
        if source.url not in tasks:
            tasks[source.url] = asyncio.create_task(decode(source))
    try:
        return dict(zip(tasks, await asyncio.gather(*tasks.values()), strict=True))
    finally:
        for task in tasks.values():
            task.cancel()


def _placed(image: DecodedImage, first: int, form: ImageFormat) -> PlacedImage:
    return PlacedImage(ImageInput(sha256=image.sha256, first=first, tokens=form.tokens), image.array)
