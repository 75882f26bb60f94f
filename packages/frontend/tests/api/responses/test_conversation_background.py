"""Background responses in a conversation: added once, after any takeover, and based on their first snapshot."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from packages.frontend.tests.api.openai.tool_chat import prompt_of
from packages.frontend.tests.api.responses.test_background import die, ended, until_running
from packages.frontend.tests.api.responses.test_conversation_responses import HELLO, texts
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import FakeEngine, serving

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]

BODY: dict[str, Any] = {"model": "tiny", "input": "hello", "background": True}


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept.sqlite"))


async def test_it_is_added_when_it_has_ended(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(auto=False), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create()
        queued = await client.responses.create(**BODY, conversation=begun.id)
        assert queued.conversation is not None
        await until_running(served)
        served.engine.step()
        assert await texts(client, begun.id) == []
        for _ in range(3):
            served.engine.step()
        made = await ended(client, queued.id)
        assert await texts(client, begun.id) == ["hello", HELLO]
        [newest] = (await client.conversations.items.list(begun.id, limit=1)).data
        assert newest.id == made.output[0].id
        inputs = [item.id async for item in client.responses.input_items.list(queued.id)]
        [oldest] = (await client.conversations.items.list(begun.id, limit=1, order="asc")).data
        assert inputs == [oldest.id]


async def test_what_a_dead_frontend_leaves_is_made_of_the_same_and_added_once(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), connect=False, store=store, peer="frontend-1") as heir:
        async with serving(engine_of(auto=False), store=store) as dying:
            client = openai_of(dying)
            before: Any = [{"role": "user", "content": text, "id": text} for text in ("tea?", "milk?")]
            begun = await client.conversations.create(items=before)
            asked: Any = [{"type": "item_reference", "id": "milk?"}, {"role": "user", "content": "hello"}]
            queued = await client.responses.create(**{**BODY, "input": asked}, conversation=begun.id)
            await until_running(dying)
            dying.engine.step()
            prompt = prompt_of(dying)
            assert prompt.count("user\nmilk?") == 2
            await client.conversations.items.delete("milk?", conversation_id=begun.id)
            await client.conversations.items.create(begun.id, items=[{"role": "user", "content": "later"}])
            await die(dying)
            await heir.connect()
            heirs = openai_of(heir)
            made = await ended(heirs, queued.id)
            assert (made.status, made.output_text) == ("completed", HELLO)
            assert prompt_of(heir) == prompt
            assert await texts(heirs, begun.id) == ["tea?", "later", "milk?", "hello", HELLO]
        listed = [item.id async for item in heirs.conversations.items.list(begun.id)]
        inputs = [item.id async for item in heirs.responses.input_items.list(queued.id)]
        assert listed[1:3] == inputs[:2], "as they were given ids when it began"


async def test_one_that_ends_at_its_frontends_death_is_not_added_again(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create()
        queued = await client.responses.create(**BODY, conversation=begun.id)
        await ended(client, queued.id)
        await die(served)
        assert served.stores is not None
        assert await served.stores.responses.take_expired(["tiny"]) == []
        assert await texts(client, begun.id) == ["hello", HELLO]
        kept = await served.stores._database.read(lambda each: each.execute("SELECT request FROM responses").fetchone())
        assert kept == (b"{}",), "what it takes to begin it again is not kept, nor a copy of the conversation with it"


@pytest.mark.parametrize("verb", ["cancel", "delete", "abort"])
async def test_one_that_comes_to_nothing_adds_nothing(
    verb: str, engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with (
        serving(engine_of(auto=False), store=store) as owner,
        serving(engine_of(), store=store, peer="frontend-1") as other,
    ):
        client = openai_of(other)
        begun = await client.conversations.create()
        queued = await openai_of(owner).responses.create(**BODY, conversation=begun.id)
        await until_running(owner)
        owner.engine.step()
        match verb:
            case "cancel":
                assert (await client.responses.cancel(queued.id)).status == "cancelled"
            case "delete":
                await client.responses.delete(queued.id)
            case _:
                await openai_of(owner).post("../abort_request", body={"rid": queued.id}, cast_to=object)
                assert (await ended(client, queued.id)).status == "failed"
        await owner.until_idle()
        assert await texts(client, begun.id) == []


async def test_turns_that_run_at_once_see_what_was_there_and_stay_whole(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with (
        serving(engine_of(), store=store) as one,
        serving(engine_of(), store=store, peer="frontend-1") as other,
    ):
        clients = [openai_of(one), openai_of(other)]
        begun = await clients[0].conversations.create()
        asked = [
            clients[number % 2].responses.create(**{**BODY, "input": str(number)}, conversation=begun.id)
            for number in range(6)
        ]
        for queued in await asyncio.gather(*asked):
            assert (await ended(clients[0], queued.id)).status == "completed"
        said = await texts(clients[1], begun.id)
        assert said[1::2] == [HELLO] * 6
        assert sorted(said[::2]) == [str(number) for number in range(6)]
