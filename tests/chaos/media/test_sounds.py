"""`kill -9` of a serving part under chats with audio: every text is the same."""

import asyncio
import base64
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

pytest.importorskip("soundfile")
pytest.importorskip("soxr")

from tests.chaos.conftest import served
from tests.chaos.parts import Parts, assert_nothing_is_left, watched
from tests.integration.sound_families import FAMILIES, LENGTHS, wav
from tests.server_process import Server

CHATS = [["odd"], ["short", "longest"], [], ["tone"], ["longest", "odd", "shortest"]]
"""Names of the sounds in each chat."""


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one part of each role, for a tiny random model that hears."""
    yield from served(model=str(FAMILIES["Qwen2-Audio"].write(tmp_path_factory.mktemp("audio") / "hearing")))


@pytest.fixture
async def parts(hearing: Server) -> AsyncIterator[Parts]:
    with watched(hearing) as parts:
        await parts.ready()
        yield parts


class Clients:
    """Streams of two choices for each of `CHATS`."""

    def __init__(self, client: openai.AsyncOpenAI) -> None:
        self._client = client
        self.streams = asyncio.Event()
        """Set when a stream of a chat with audio has text."""

    async def texts(self) -> list[list[str]]:
        return await asyncio.gather(*map(self._texts, CHATS))

    async def _texts(self, names: list[str]) -> list[str]:
        data = [base64.b64encode(wav(name)).decode() for name in names]
        sounds = [{"type": "input_audio", "input_audio": {"data": each, "format": "wav"}} for each in data]
        messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hear"}, *sounds]}]
        texts = ["", ""]
        stream = await self._client.chat.completions.create(
            model="hearing",
            messages=messages,
            n=2,
            max_tokens=300,
            seed=5,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
            if names and all(texts):
                self.streams.set()
        return texts


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_chat_with_audio_goes_on(parts: Parts, role: str) -> None:
    assert {name for names in CHATS for name in names} == set(LENGTHS)
    before = await parts.resumed()
    async with openai.AsyncOpenAI(base_url=f"{parts.server.url}/v1", api_key="none", max_retries=0) as client:
        clients = Clients(client)
        expected = await clients.texts()
        assert len({text for texts in expected for text in texts}) == 2 * len(CHATS)
        clients.streams.clear()
        running = asyncio.create_task(clients.texts())
        await clients.streams.wait()
        name = parts.busiest(role)
        await parts.replaced(name, parts.signal(name, signal.SIGKILL))
        assert await running == expected
    assert_nothing_is_left(await parts.idle())
    assert await parts.resumed() > before
