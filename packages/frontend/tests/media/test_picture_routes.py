"""Pictures of all routes reach schedulers, from `data:` URLs and from allowed hosts."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from tokenizers import Tokenizer

pytest.importorskip("PIL")
pytest.importorskip("httpcore2")

from packages.frontend.tests.media.files import data_url, noise, saved
from packages.frontend.tests.media.hosts import internet, response
from packages.frontend.tests.media.seeing import image, seeing, text, user
from tercet.frontend.config.validation import read_media_hosts
from tercet.frontend.media.decoder import PictureDecoder
from tercet.frontend.media.fetcher import PictureFetcher
from tercet.frontend.testing import FakeEngine, Served, serving
from tercet.protocol.messages.values import ModelLimits

HttpOf = Callable[[Served], httpx2.AsyncClient]
FILES = [saved(noise(20, 30, seed=seed)) for seed in (1, 2)]
DOG = data_url(FILES[1])
CAT_ARRAY, DOG_ARRAY = (noise(20, 30, seed=seed).resize((6, 4), 2).tobytes() for seed in (1, 2))
URL = "http://images.example.org/cat.png"


@pytest.fixture
def engine(
    engine_of: Callable[..., FakeEngine], files: dict[str, bytes], limits: ModelLimits, tokenizer: Tokenizer
) -> FakeEngine:
    return seeing(engine_of, files, limits, tokenizer)


@pytest.fixture
async def served(engine: FakeEngine) -> AsyncIterator[Served]:
    async with serving(engine) as running:
        yield running


def arrays(engine: FakeEngine) -> list[list[bytes]]:
    """Return the arrays of each request so far."""
    return [[bytes(frame) for frame in frames] for frames in engine.frames]


async def test_one_request_reads_a_url_once(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    async with internet(response(FILES[0])) as net:
        fetcher = PictureFetcher(read_media_hosts(["images.example.org"]), net.resolve, net)
        served.manager.pictures = PictureDecoder(workers=1, fetcher=fetcher)
        http = http_of(served)
        body: dict[str, Any] = {"model": "tiny", "messages": [user(image(URL)), user(image(URL), image(DOG))], "n": 2}
        counted = await http.post("/tokenize", json={"messages": body["messages"]})
        assert (counted.status_code, net.connected) == (200, []), "tokens are counted without the picture"
        for _ in range(2):
            assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        block = {"type": "image", "source": {"type": "url", "url": URL}}
        message = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
        assert (await http.post("/v1/messages", json=message)).status_code == 200
    chat = [CAT_ARRAY, CAT_ARRAY, DOG_ARRAY]
    assert arrays(engine) == [chat, chat, [CAT_ARRAY]]
    assert len(net.connected) == 3


async def test_a_url_that_fails_is_named_with_its_place(served: Served, engine: FakeEngine, http_of: HttpOf) -> None:
    async with internet(response(b"", "404 Not Found")) as net:
        fetcher = PictureFetcher(read_media_hosts(["images.example.org"]), net.resolve, net)
        served.manager.pictures = PictureDecoder(workers=1, fetcher=fetcher)
        body = {"model": "tiny", "messages": [user(text("see"), image(URL))]}
        answer = await http_of(served).post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "messages[0].content[1]", "invalid_image_url")
    assert "status 404" in error["message"]
    assert engine.requests() == []
