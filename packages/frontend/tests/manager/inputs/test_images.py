"""Images of one request are decoded a few at a time, and none is decoded after one has failed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tercet.frontend.errors import BadRequestError
from tercet.frontend.manager.inputs.images import decoded_images, placed_images
from tercet.frontend.media.image_decoder import DecodedImage, ImageSource
from tercet.frontend.model.prompts import ChatPrompt
from tercet.protocol.messages.any_resolution import PaddedSquare
from tercet.protocol.messages.media import FixedSize, ImageFormat

FORM = ImageFormat(
    size=FixedSize(height=1, width=2),
    patch=1,
    resample=2,
    marker="<m>",
    token="<i>",
    token_id=7,
    max_tokens=2,
)
MODEL: Any = SimpleNamespace(limits=SimpleNamespace(images=FORM, sounds=None, video=None))


class Decoder:
    """Decoder whose work ends when it is let go; `faulty` URLs fail."""

    def __init__(self, *faulty: str) -> None:
        self.faulty = faulty
        self.running: list[str] = []
        self.most = 0
        self.go = asyncio.Event()

    async def decode(self, source: ImageSource, form: ImageFormat) -> DecodedImage:
        assert form == FORM
        self.running.append(source.url)
        self.most = max(self.most, len(self.running))
        try:
            if source.url in self.faulty:
                raise BadRequestError("no image", param=source.param)
            await self.go.wait()
        finally:
            self.running.remove(source.url)
        return DecodedImage(array=source.url.encode(), height=1, width=2, sha256=source.url.encode())


def prompt_of(*urls: str) -> ChatPrompt:
    sources = [ImageSource(url=url, param=f"messages[{place}]") for place, url in enumerate(urls)]
    return ChatPrompt(messages=[], images=sources)


async def test_a_few_are_decoded_at_a_time_and_each_url_once() -> None:
    decoder: Any = Decoder()
    first, second = prompt_of(*"abcdefgh", "a"), prompt_of("b")
    placing = asyncio.ensure_future(decoded_images(SimpleNamespace(images=decoder), [first, second], MODEL))
    for _ in range(20):
        await asyncio.sleep(0)
    assert decoder.running == list("abcd")
    decoder.go.set()
    decoded = await placing
    placed, [other] = (
        placed_images(images, prompt, ids, FORM)
        for images, prompt, ids in zip(decoded, (first, second), ([7] * 18, [1, 7, 7]), strict=True)
    )
    assert [each.array for each in placed] == [each.encode() for each in (*"abcdefgh", "a")]
    assert [each.place.first for each in placed] == [*range(0, 18, 2)]
    assert (other.array, other.place.first) == (b"b", 1)
    assert decoder.most == 4


async def test_images_of_a_prompt_with_several_have_their_own_form() -> None:
    form = msgspec.structs.replace(FORM, several=PaddedSquare(side=4, background=(1, 2, 3)))
    asked: list[tuple[str, int]] = []

    async def decode(source: ImageSource, form: ImageFormat) -> DecodedImage:
        assert isinstance(form.size, FixedSize | PaddedSquare)
        side = form.size.side if isinstance(form.size, PaddedSquare) else form.size.height
        asked.append((source.url, side))
        return DecodedImage(array=b"", height=side, width=side, sha256=b"")

    decoders: Any = SimpleNamespace(images=SimpleNamespace(decode=decode))
    model: Any = SimpleNamespace(limits=SimpleNamespace(images=form, sounds=None))
    decoded = await decoded_images(decoders, [prompt_of("a"), prompt_of("a", "b", "a"), prompt_of("b")], model)
    heights = [[each.height for each in images if isinstance(each, DecodedImage)] for images in decoded]
    assert heights == [[1], [4, 4, 4], [1]]
    assert sorted(asked) == [("a", 1), ("a", 4), ("b", 1), ("b", 4)], "each form of a URL is decoded once"


async def test_a_failure_ends_the_others_and_names_the_first_place() -> None:
    decoder: Any = Decoder("c")
    with pytest.raises(BadRequestError) as caught:
        await decoded_images(SimpleNamespace(images=decoder), [prompt_of("a", "b", "c", "d", "c")], MODEL)
    assert caught.value.param == "messages[2]"
    await asyncio.sleep(0)
    assert decoder.running == []
