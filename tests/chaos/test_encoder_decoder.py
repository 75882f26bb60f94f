"""`kill -9` of a serving part under completions of a model with an encoder and a decoder: every text is the same."""

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest

from packages.scheduler.tests.models.encoder_decoder.checkpoint import write_bart
from tests.chaos.conftest import served
from tests.chaos.parts import Parts, assert_nothing_is_left, watched
from tests.server_process import Server

PROMPTS = [f"{number} storms are expected. " * number for number in range(1, 12)]
MORE: dict[str, Any] = {"max_tokens": 300, "temperature": 0.7, "seed": 5, "n": 2, "extra_body": {"ignore_eos": True}}
Texts = list[list[str]]


@pytest.fixture(scope="module")
def reading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Yield a server of one part of each role, for a tiny random BART."""
    directory = tmp_path_factory.mktemp("encoder") / "reading"
    yield from served(model=str(write_bart(directory, max_position_embeddings=2048)))


@pytest.fixture
async def parts(reading: Server) -> AsyncIterator[Parts]:
    with watched(reading) as parts:
        await parts.ready()
        yield parts


async def texts(client: openai.AsyncOpenAI, begun: asyncio.Event) -> Texts:
    """Return the answers to all prompts, one of which is streamed; set `begun` when it has text."""

    async def streamed() -> list[str]:
        said = ["", ""]
        stream = await client.completions.create(model="reading", prompt=PROMPTS[0], stream=True, **MORE)
        async for chunk in stream:
            for choice in chunk.choices:
                said[choice.index] += choice.text
            begun.set()
        return said

    async def whole(prompt: str) -> list[str]:
        answer = await client.completions.create(model="reading", prompt=prompt, **MORE)
        return [choice.text for choice in answer.choices]

    return await asyncio.gather(streamed(), *map(whole, PROMPTS))


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
async def test_every_answer_goes_on(parts: Parts, role: str) -> None:
    before = await parts.resumed()
    async with openai.AsyncOpenAI(base_url=f"{parts.server.url}/v1", api_key="none", max_retries=0) as client:
        expected = await texts(client, asyncio.Event())
        assert expected[0] == expected[1]
        assert len({text for each in expected for text in each}) == 2 * len(PROMPTS)
        begun = asyncio.Event()
        running = asyncio.create_task(texts(client, begun))
        await begun.wait()
        name = parts.busiest(role)
        await parts.replaced(name, parts.signal(name, signal.SIGKILL))
        assert await running == expected
    assert_nothing_is_left(await parts.idle())
    assert await parts.resumed() > before
