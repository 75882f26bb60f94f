"""`kill -9` of a serving part, or of the helper that decodes, under chats with clips: every text is the same."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import psutil
import pytest

pytest.importorskip("av")

from packages.frontend.tests.media.video.video_files import data_url, video
from packages.scheduler.tests.models.vision.qwen_checkpoint import write_qwen
from tests.chaos.conftest import served
from tests.chaos.parts import Parts, assert_nothing_is_left, watched
from tests.server_process import Server

HELPER = "tercet.frontend.media.video.worker"
CLIPS = [data_url(video(frames, size=(40, 24))) for frames in (20, 35, 12)]
Texts = list[str]


@pytest.fixture(scope="module")
def watching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one part of each role, for a tiny random Qwen3-VL."""
    yield from served(model=str(write_qwen(tmp_path_factory.mktemp("video") / "watching", "Qwen3VL")))


@pytest.fixture
async def parts(watching: Server) -> AsyncIterator[Parts]:
    with watched(watching) as parts:
        await parts.ready()
        yield parts


class Clients:
    """Streams of chats about each clip."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.streams = asyncio.Event()
        """Set when a stream has text."""

    async def texts(self) -> Texts:
        return await asyncio.gather(*map(self._streamed, CLIPS))

    async def _streamed(self, url: str) -> str:
        create: Any = self._client.chat.completions.create
        parts = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "See?"}]
        asked = {"messages": [{"role": "user", "content": parts}], "max_tokens": 150, "temperature": 0.0}
        text = ""
        async for each in await create(model="watching", stream=True, extra_body={"ignore_eos": True}, **asked):
            self.streams.set()
            text += each.choices[0].delta.content or ""
        return text


@pytest.fixture
async def clients(parts: Parts) -> AsyncIterator[Clients]:
    async with openai.AsyncOpenAI(base_url=f"{parts.server.url}/v1", api_key="none", max_retries=0) as client:
        yield Clients(client)


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_chat_with_a_clip_goes_on(parts: Parts, clients: Clients, role: str) -> None:
    before = await parts.resumed()
    expected = await clients.texts()
    assert len({*expected}) == len(CLIPS)
    clients.streams.clear()
    running = asyncio.create_task(clients.texts())
    await clients.streams.wait()
    name = parts.busiest(role)
    await parts.replaced(name, parts.signal(name, signal.SIGKILL))
    assert await running == expected
    assert await parts.resumed() > before
    assert_nothing_is_left(await parts.idle())


def helpers(parts: Parts) -> list[psutil.Process]:
    """Return the processes that decode clips."""
    return [each for each in psutil.Process(parts.pids()["frontend-0"]).children() if HELPER in each.cmdline()]


async def test_clips_are_decoded_again_after_the_death_of_a_helper(parts: Parts, clients: Clients) -> None:
    expected = await clients.texts()
    for idle in (found := helpers(parts)):
        idle.kill()
    psutil.wait_procs(found, 10)
    running = asyncio.create_task(clients.texts())
    while not (alive := helpers(parts)):  # noqa: ASYNC110 - nothing reports it
        await asyncio.sleep(0.005)
    alive[0].kill()
    assert await running == expected
    assert any("the work is repeated" in line for line in parts.server.lines)
    assert_nothing_is_left(await parts.idle())
