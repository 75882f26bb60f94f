"""Structured output, stop strings, streams and killed parts, on the text of a real model."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.real.goldens import TOKENS
from tests.real.prompts import SHORT
from tests.server_process import Server

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "hobbies": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
        "pet": {"enum": ["cat", "dog", "none"]},
    },
    "required": ["name", "age", "hobbies", "pet"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
NAMES = (
    "cats",
    "summary",
    "hindi",
    "moon",
    "letter",
    "french",
    "chinese",
    "arabic",
    "emoji",
    "palindrome",
    "sql",
    "pirate",
    "trip",
)
CHATS: list[Any] = [prompt.chat() for prompt in SHORT if prompt.name in NAMES]
"""Chats whose answers hang on no near tie, since requests that run together may differ by rounding."""


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with server.client() as client:
        yield client


def answer(client: OpenAI, messages: Any, **options: Any) -> str:
    """Return the greedy answer to a chat."""
    options = {"model": "smollm2-135m", "temperature": 0, "max_tokens": TOKENS, **options}
    return client.chat.completions.create(messages=messages, **options).choices[0].message.content or ""


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("who", ["a retired baker in Lyon", "Алиса, студентка"])
def test_answers_match_their_schema(client: OpenAI, who: str, temperature: int) -> None:
    messages = [{"role": "user", "content": f"Describe a person as JSON: {who}."}]
    options = {"temperature": temperature, "seed": 3, "max_tokens": 200}
    jsonschema.validate(json.loads(answer(client, messages, response_format=FORMAT, **options)), SCHEMA)


@pytest.mark.parametrize("number", [1, 3, 8])
def test_a_stop_string_ends_an_answer(client: OpenAI, number: int) -> None:
    whole = answer(client, CHATS[number])
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    assert stop
    assert answer(client, CHATS[number], stop=[stop, "no such text"]) == whole[: whole.index(stop)]


async def stream(client: AsyncOpenAI, messages: Any, begun: asyncio.Event | None = None) -> str:
    """Return a streamed answer; an event says that it has begun."""
    chunks = await client.chat.completions.create(
        model="smollm2-135m", messages=messages, temperature=0, max_tokens=TOKENS, stream=True
    )
    text = ""
    async for chunk in chunks:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        if begun is not None and len(text) > 20:
            begun.set()
    return text


async def streams(server: Server, begun: asyncio.Event | None = None) -> list[str]:
    """Return the streamed answers to all chats at once."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120) as client:
        return await asyncio.gather(*(stream(client, messages, begun) for messages in CHATS))


@pytest.fixture(scope="module")
def texts(server: Server) -> list[str]:
    """Return the answers to all chats, which nothing disturbed."""
    return asyncio.run(streams(server))


@pytest.mark.parametrize("number", [0, 5, 7])
def test_streamed_text_equals_an_answer(client: OpenAI, texts: list[str], number: int) -> None:
    assert texts[number] == answer(client, CHATS[number])


@pytest.mark.parametrize("part", ["scheduler-0", "detokenizer-0"])
async def test_streams_outlive_a_killed_part(server: Server, texts: list[str], part: str) -> None:
    begun = asyncio.Event()
    disturbed = asyncio.create_task(streams(server, begun))
    await begun.wait()
    assert not disturbed.done()
    killed = server.part(part)
    os.kill(killed.pid, signal.SIGKILL)
    assert await disturbed == texts
    assert server.part(part).pid != killed.pid
