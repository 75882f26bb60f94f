"""Sixty-four concurrent streams, some of which stop early or hang up: one final answer each, and no page is lost."""

import asyncio
import random

import pytest
from openai import AsyncOpenAI

from tests.server_process import Server


async def one(client: AsyncOpenAI, model: str, number: int, chance: random.Random) -> str:
    """Run one stream and return how it ended."""
    length = chance.randrange(1, 120)
    stop = chance.choice([None, None, ["e"], ["the ", "qz"]])
    leave_after = chance.choice([None, None, None, chance.randrange(1, 20)])
    prompt = "word " * chance.randrange(1, 80) + str(number)
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=length,
        stop=stop,
        temperature=chance.choice([0.0, 1.0]),
        stream=True,
        n=chance.choice([1, 1, 1, 2]),
        extra_body={"ignore_eos": chance.random() < 0.5},
    )
    finishes: dict[int, str] = {}
    text = ""
    chunks = 0
    async for chunk in stream:
        chunks += 1
        for choice in chunk.choices:
            assert choice.index not in finishes
            if choice.index == 0:
                text += choice.text
            if choice.finish_reason:
                finishes[choice.index] = choice.finish_reason
        if leave_after is not None and chunks >= leave_after:
            await stream.close()
            return "left"
    assert finishes
    assert set(finishes.values()) <= {"stop", "length"}
    for word in stop or ():
        assert word not in text
    return "finished"


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_every_stream_ends_once_and_nothing_is_left(server: Server, model: str, seed: int) -> None:
    chance = random.Random(seed)
    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=120)
    async with client:
        ends = await asyncio.gather(
            *(one(client, model, number, random.Random(chance.random())) for number in range(64))
        )
    assert ends.count("finished") > 20
    assert ends.count("left") > 3
    load = await asyncio.to_thread(server.wait_for, lambda load: load["running"] == load["queued"] == 0)
    assert load["pages_free"] + load["pages_cached"] == load["pages_total"]
    assert load["slots_free"] == load["slots_total"]
    info = await asyncio.to_thread(server.get, "/server_info")
    assert info["requests_running"] == 0
