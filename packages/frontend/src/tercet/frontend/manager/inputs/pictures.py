"""Pictures of prompts, decoded, with their places among the tokens."""

from collections.abc import Sequence

import msgspec

from tercet.frontend.errors import BadRequestError, ServerError
from tercet.frontend.media.decoder import Picture, PictureDecoder
from tercet.frontend.model.prompts import ChatPrompt, Prompt, TokenPrompt
from tercet.frontend.model.served_model import ServedModel
from tercet.protocol.messages.media import PictureInput


class PlacedPicture(msgspec.Struct, frozen=True):
    """Picture with its place in a prompt, and its array."""

    place: PictureInput
    array: bytes


async def placed_pictures(
    decoder: PictureDecoder, prompts: Sequence[Prompt], ids: Sequence[Sequence[int]], model: ServedModel
) -> list[list[PlacedPicture]]:
    """Decode the pictures of prompts with these token ids, one at a time, and each URL once. Raises ApiError."""
    decoded: dict[str, Picture] = {}
    return [await _placed(decoder, prompt, tokens, model, decoded) for prompt, tokens in zip(prompts, ids, strict=True)]


async def _placed(
    decoder: PictureDecoder, prompt: Prompt, ids: Sequence[int], model: ServedModel, decoded: dict[str, Picture]
) -> list[PlacedPicture]:
    form = model.limits.pictures
    if isinstance(prompt, TokenPrompt) or not prompt.pictures or form is None:
        return []
    firsts = [place for place, token in enumerate(ids) if token == form.token_id][:: form.tokens]
    if len(firsts) != len(prompt.pictures):
        if isinstance(prompt, ChatPrompt):
            raise ServerError("The tokenizer has no placeholder tokens for pictures.")
        raise BadRequestError(f"The text writes tokens of pictures besides {form.marker!r}.", param=prompt.param)
    placed = []
    for source, first in zip(prompt.pictures, firsts, strict=True):
        if (picture := decoded.get(source.url)) is None:
            picture = decoded[source.url] = await decoder.decode(source, form)
        place = PictureInput(sha256=picture.sha256, first=first, tokens=form.tokens)
        placed.append(PlacedPicture(place, picture.array))
    return placed
