"""Images are decoded where they can do no harm."""

import asyncio
import base64
import hashlib
import os
import signal
import struct
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

pytest.importorskip("PIL")

from PIL import Image

from packages.frontend.tests.media.image_files import (
    FORM,
    data_url,
    many_frames,
    noise,
    odd_images,
    png_bomb,
    png_with_text,
    saved,
    webp_claiming,
)
from packages.frontend.tests.polling import until
from tercet.frontend.errors import BadRequestError, UnavailableError
from tercet.frontend.helper import pool
from tercet.frontend.media import image_worker
from tercet.frontend.media.image_decoder import DecodedImage, ImageDecoder, ImageSource, digest_of
from tercet.frontend.media.image_pipe import Decode, Decoded

SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><rect width="9" height="9"/></svg>'
GOOD, GIF = saved(noise(40, 30)), saved(noise(9, 9), "GIF")


@pytest.fixture
async def decoder() -> AsyncIterator[ImageDecoder]:
    made = ImageDecoder(workers=1)
    yield made
    await made.close()


def order_of(file: bytes) -> Decode:
    return Decode(base64=base64.b64encode(file).decode(), size=FORM.size, patch=FORM.patch, resample=2, seconds=1)


async def decoded(decoder: ImageDecoder, url: str) -> DecodedImage:
    return await decoder.decode(ImageSource(url=url, param="messages[0].content[1]"), FORM)


async def refusal(decoder: ImageDecoder, url: str) -> str:
    with pytest.raises(BadRequestError) as error:
        await decoded(decoder, url)
    assert error.value.param == "messages[0].content[1]"
    return error.value.message


def test_odd_images_become_arrays_of_the_form() -> None:
    images = [image_worker.decoded_image(order_of(file)) for file in odd_images().values()]
    assert {(each.height, each.width, len(each.array)) for each in images} == {(28, 14, 3 * 28 * 14)}


async def test_the_array_and_its_hash_come_from_a_helper(decoder: ImageDecoder) -> None:
    image = await decoded(decoder, data_url(GOOD))
    assert image.array == noise(40, 30).resize((14, 28), Image.Resampling.BILINEAR).tobytes()
    assert (image.height, image.width) == (28, 14)
    assert image.sha256 == hashlib.sha256(b"28 14 0 0 " + image.array).digest()


OTHERS = [(1, (0, 0)), (2, (0, 0)), (1, (2, 3)), (1, (3, 2)), (1, (1, 6))]
"""Heights and grids of images with equal arrays."""


def test_hashes_differ_where_arrays_are_equal_and_sizes_or_grids_differ() -> None:
    grids = [Decoded(array=bytes(18), height=height, width=6 // height, grid=grid) for height, grid in OTHERS]
    assert len({digest_of(image) for image in grids}) == len(OTHERS)


BAD = {
    "a PNG bomb": (png_bomb(20_000, 10_000), "200000000 pixels"),
    "a GIF that claims many pixels": (GIF[:6] + struct.pack("<HH", 65_000, 65_000) + GIF[10:], "4225000000 pixels"),
    "a WebP that claims many pixels": (webp_claiming(8000, 8000), "64000000 pixels"),
    "a WebP that claims more than memory": (webp_claiming(60_000, 60_000), "damaged"),
    "a PNG of much text": (png_with_text(100_000_000), "damaged"),
    "a GIF that is cut off": (saved(noise(300, 300), "GIF")[:-900], "damaged"),
    "a WebP that is cut off": (saved(noise(300, 300), "WEBP")[:-900], "damaged"),
    "a JPEG that is cut off": (saved(noise(300, 300), "JPEG")[:-900], "damaged"),
    "a PNG that is cut off": (saved(noise(300, 300))[:-900], "damaged"),
    "a TIFF": (saved(noise(9, 9), "TIFF"), "none of"),
    "an SVG": (SVG, "none of"),
    "a text": (b"no image", "none of"),
    "no bytes": (b"", "none of"),
}


async def test_a_bad_file_costs_its_sender_a_400(decoder: ImageDecoder) -> None:
    refusals = {name: await refusal(decoder, data_url(file)) for name, (file, _) in BAD.items()}
    assert {name: why for name, (_, why) in BAD.items() if why not in refusals[name]} == {}
    [pid] = decoder.pids
    await decoded(decoder, data_url(GOOD))
    assert decoder.pids == [pid], "the helper lives on"


URLS = {
    "data:image/png;base64,%%%": "no base64",
    "data:image/png;base64,é": "no base64",
    "data:image/png,abc": "no ';base64,'",
    "data:image/png;base64": "no ';base64,'",
    "file:///etc/passwd": "'data:' URLs only",
    "gopher://127.0.0.1/": "'data:' URLs only",
    "http://127.0.0.1/a.png": "'data:' URLs only",
    "/etc/passwd": "'data:' URLs only",
}


async def test_other_urls_are_refused(decoder: ImageDecoder) -> None:
    assert {url for url, why in URLS.items() if why not in await refusal(decoder, url)} == set()


@pytest.mark.parametrize("kind", ["GIF", "WEBP"])
async def test_of_ten_thousand_frames_only_the_first_is_decoded(decoder: ImageDecoder, kind: str) -> None:
    image = await decoded(decoder, data_url(many_frames(kind, 10_000)))
    assert image == await decoded(decoder, data_url(many_frames(kind, 2)))


async def test_an_image_that_takes_too_long_ends_its_helper() -> None:
    decoder = ImageDecoder(workers=1, seconds=0.02)
    assert "takes too long" in await refusal(decoder, data_url(saved(Image.new("L", (6000, 6000)), compress_level=1)))
    assert decoder.pids == []
    await decoder.close()


def test_an_image_that_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(image_worker, "decoded_image", fail)
    assert image_worker._decoded(order_of(GOOD)).error == "it takes too much memory to decode"


@pytest.mark.parametrize("new_event_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_killed_helper_is_replaced(new_event_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def kill() -> None:
        decoder = ImageDecoder(workers=1)
        await decoded(decoder, data_url(GOOD))
        for milliseconds in (0, 1, 2, 3, 3, 3):  # event loops see the death of a process in several steps
            [pid] = decoder.pids
            os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(milliseconds / 1000)
            await decoded(decoder, data_url(GOOD))
            assert decoder.pids != [pid]
        await decoder.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(kill())


async def test_a_helper_that_died_idle_costs_no_attempt(decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_MAX_ATTEMPTS", 1)
    await decoded(decoder, data_url(GOOD))
    [pid] = decoder.pids
    os.kill(pid, signal.SIGKILL)
    await until(lambda: decoder.pids == [])
    await decoded(decoder, data_url(GOOD))


async def test_more_images_than_may_wait_are_refused() -> None:
    decoder = ImageDecoder(workers=1, max_waiting=1)
    results = await asyncio.gather(*(decoded(decoder, data_url(GOOD)) for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in results] == [DecodedImage, DecodedImage, UnavailableError]
    await decoder.close()
