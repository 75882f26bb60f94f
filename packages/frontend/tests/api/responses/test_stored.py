"""Stored responses: retrieval, continuation, deletion and ownership."""

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from packages.frontend.tests.api.openai.tool_chat import prompt_of
from tercet.frontend.config.config import HttpConfig, StoreConfig
from tercet.frontend.testing import FakeEngine, serving

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]

BODY: dict[str, Any] = {"model": "tiny", "input": "hello"}


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept" / "responses.sqlite"))


async def last_of_stream(client: openai.AsyncOpenAI) -> Any:
    """Return the last event of a streamed response."""
    return [event async for event in await client.responses.create(**BODY, stream=True)][-1]


async def test_a_stored_response_can_be_come_back_for(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        made = await client.responses.create(**BODY, instructions="be kind")
        streamed = (await last_of_stream(client)).response
        assert await client.responses.retrieve(made.id) == made
        assert (await client.responses.retrieve(streamed.id)).output == streamed.output
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        unstored = await client.responses.create(**BODY, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored.id)


async def test_a_response_goes_on_from_another(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        first = await client.responses.create(**BODY, instructions="be kind")
        second = await client.responses.create(model="tiny", input="and you?", previous_response_id=first.id)
        third = await client.responses.create(model="tiny", input="why?", previous_response_id=second.id)
        assert third.previous_response_id == second.id
        prompt = prompt_of(served)
        said = ["user\nhello", "assistant\nHello world!", "user\nand you?", "assistant\nHello world!", "user\nwhy?"]
        assert re.search(".*".join(map(re.escape, said)), prompt, re.DOTALL)
        assert "be kind" not in prompt
        pages = [item async for item in client.responses.input_items.list(third.id, order="asc", limit=2)]
        assert [item.role for item in pages] == ["user", "assistant", "user", "assistant", "user"]  # type: ignore[union-attr]
        newest = await client.responses.input_items.list(third.id, limit=1)
        assert newest.data[0].content[0].text == "why?"  # type: ignore[union-attr,index]
        assert newest.has_more
        with pytest.raises(openai.BadRequestError) as unknown:
            await client.responses.input_items.list(third.id, after="msg_none")
        assert unknown.value.param == "after"
        again = await client.responses.create(model="tiny", input=[{"type": "item_reference", "id": pages[1].id}])
        assert again.status == "completed"
        assert "Hello world!" in prompt_of(served)


async def test_a_response_belongs_to_its_key(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("mine", "yours")), store=store) as served:
        mine, yours = openai_of(served, api_key="mine"), openai_of(served, api_key="yours")
        made = await mine.responses.create(**BODY)
        item = made.output[0].id
        for ask in (yours.responses.retrieve, yours.responses.delete, yours.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.NotFoundError):
            await yours.responses.input_items.list(made.id)
        with pytest.raises(openai.BadRequestError) as error:
            await yours.responses.create(**BODY, previous_response_id=made.id)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.BadRequestError):
            await yours.responses.create(model="tiny", input=[{"type": "item_reference", "id": item}])
        assert (await mine.responses.retrieve(made.id)).id == made.id


async def test_without_a_store_nothing_is_found_and_answers_still_come(
    engine_of: EngineOf, openai_of: OpenAIOf
) -> None:
    async with serving(engine_of()) as served:
        client = openai_of(served)
        made = await client.responses.create(**BODY)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)


async def test_a_store_that_fails_is_what_clients_are_told_of(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig, caplog: pytest.LogCaptureFixture
) -> None:
    said = "The store of responses does not answer: no such table: responses."
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        with sqlite3.connect(store.response_store) as connection:
            connection.execute("DROP TABLE responses")
        connection.close()
        with pytest.raises(openai.InternalServerError, match=said):
            await client.responses.create(**BODY)
        last = await last_of_stream(client)
        assert last.type == "response.failed"
        assert last.response.error
        assert last.response.error.message == said
        assert (await client.responses.create(**BODY, store=False)).output_text == "Hello world!"
    assert [record.message.partition(" error=")[2] for record in caplog.records if record.levelname == "ERROR"] == [
        said
    ] * 2
    assert not [record for record in caplog.records if record.exc_info]
