"""Responses in a conversation: the prompt that the model gets, and the items that are stored."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from packages.frontend.tests.api.openai.tool_chat import CALL, prompt_of, saying, tool_engine
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.testing import FakeEngine, serving
from tercet.protocol.messages.messages import Rejected, TokenizedGenerateReqInput
from tercet.protocol.messages.values import ModelLimits

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]

BODY: dict[str, Any] = {"model": "tiny", "input": "hello"}
HELLO = "Hello world!"


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept.sqlite"))


async def texts(client: openai.AsyncOpenAI, conversation: str) -> list[str]:
    """Return the text of each message of a conversation, oldest first."""
    listed = client.conversations.items.list(conversation, order="asc", limit=100)
    return [item.content[0].text async for item in listed]  # type: ignore[union-attr,index]


async def test_a_response_begins_with_the_conversation_and_adds_to_it(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create(items=[{"role": "system", "content": "Be kind."}])
        first = await client.responses.create(**BODY, conversation=begun.id, instructions="Be brief.")
        assert first.conversation is not None
        assert first.conversation.id == begun.id
        second = await client.responses.create(model="tiny", input="and you?", conversation={"id": begun.id})
        said = ["system\nBe kind.", "user\nhello", f"assistant\n{HELLO}", "user\nand you?"]
        assert re.search(".*".join(map(re.escape, said)), prompt_of(served), re.DOTALL)
        assert "Be brief" not in prompt_of(served)
        assert await texts(client, begun.id) == ["Be kind.", "hello", HELLO, "and you?", HELLO]
        listed = [item async for item in client.conversations.items.list(begun.id)]
        assert [listed[2].id, listed[0].id] == [first.output[0].id, second.output[0].id]
        inputs = [item async for item in client.responses.input_items.list(second.id, order="asc")]
        assert [item.id for item in inputs] == [item.id for item in listed[:0:-1]]
        assert await client.responses.retrieve(second.id) == second
        assert (await client.responses.create(**BODY)).conversation is None


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
async def test_it_is_added_to_however_the_response_is_made(
    stored: bool, streamed: bool, engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create()
        asked: dict[str, Any] = {**BODY, "conversation": begun.id, "store": stored}
        if streamed:
            events = [event async for event in await client.responses.create(**asked, stream=True)]
            assert all(event.response.conversation.id == begun.id for event in (events[0], events[-1]))
            assert events[-1].type == "response.completed"
        else:
            await client.responses.create(**asked)
        assert await texts(client, begun.id) == ["hello", HELLO]


async def test_a_response_that_is_cut_is_added_and_the_next_may_have_no_input(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create()
        with pytest.raises(openai.BadRequestError) as nothing:
            await client.responses.create(model="tiny", conversation=begun.id)
        assert (nothing.value.param, nothing.value.code) == ("input", "missing_required_parameter")
        cut = await client.responses.create(**BODY, conversation=begun.id, max_output_tokens=2)
        assert cut.status == "incomplete"
        assert await texts(client, begun.id) == ["hello", "Hello wor"]
        await client.responses.create(model="tiny", conversation=begun.id)
        assert await texts(client, begun.id) == ["hello", "Hello wor", HELLO]


async def test_a_response_that_fails_adds_nothing(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    def refused(request: TokenizedGenerateReqInput) -> Rejected:
        return Rejected(rid=request.rid, attempt=request.attempt, code="bad", message="no", retry=False)

    async with serving(engine_of(reject=refused), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create()
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(**BODY, conversation=begun.id)
        assert await texts(client, begun.id) == []


async def test_what_is_there_already_is_shown_again_and_kept_once(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create(items=[{"role": "user", "content": "tea?", "id": "m1"}])  # type: ignore[list-item]
        reference: Any = {"type": "item_reference", "id": "m1"}
        await client.responses.create(model="tiny", input=[reference], conversation=begun.id, store=False)
        assert prompt_of(served).count("user\ntea?") == 2
        assert await texts(client, begun.id) == ["tea?", HELLO]
        repeated: Any = {"role": "user", "content": "tea?", "id": "m1"}
        await client.responses.create(model="tiny", input=[repeated], conversation=begun.id)
        assert await texts(client, begun.id) == ["tea?", HELLO, HELLO]


async def test_previous_response_works_while_its_conversation_exists(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create(items=[{"role": "user", "content": "tea?"}])
        first = await client.responses.create(**BODY, conversation=begun.id)
        await client.responses.create(model="tiny", input="later", conversation=begun.id)
        aside = await client.responses.create(model="tiny", input="why?", previous_response_id=first.id)
        said = ["user\ntea?", "user\nhello", f"assistant\n{HELLO}", "user\nwhy?"]
        assert re.search(".*".join(map(re.escape, said)), prompt_of(served), re.DOTALL)
        assert "later" not in prompt_of(served)
        assert await texts(client, begun.id) == ["tea?", "hello", HELLO, "later", HELLO]
        await client.conversations.delete(begun.id)
        with pytest.raises(openai.BadRequestError, match=f"'{begun.id}'.* is not there") as lost:
            await client.responses.create(model="tiny", input="why?", previous_response_id=aside.id)
        assert (lost.value.param, lost.value.code) == ("previous_response_id", "previous_response_not_found")
        with pytest.raises(openai.NotFoundError):
            await client.responses.input_items.list(first.id)
        assert (await client.responses.retrieve(first.id)).output == first.output


async def test_input_tokens_count_the_conversation(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create(items=[{"role": "user", "content": "tea?"}])
        counted = await client.responses.input_tokens.count(model="tiny", input="hello", conversation=begun.id)
        made = await client.responses.create(**BODY, conversation=begun.id)
        alone = await client.responses.input_tokens.count(model="tiny", input="hello")
        assert made.usage is not None
        assert alone.input_tokens < counted.input_tokens == made.usage.input_tokens
        assert len(await texts(client, begun.id)) == 3, "counting adds nothing"


async def test_an_output_whose_call_was_taken_out_is_the_conversations_fault(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    call: Any = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}", "id": "call"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": "rain"}
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create(items=[call, output])
        await client.conversations.items.delete("call", conversation_id=begun.id)
        with pytest.raises(openai.BadRequestError) as lost:
            await client.responses.create(**BODY, conversation=begun.id)
        assert lost.value.param == "conversation"


async def test_a_conversation_deleted_meanwhile_is_not_made_again(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(auto=False), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create()
        stream = await client.responses.create(**BODY, conversation=begun.id, background=True, stream=True)
        await client.conversations.delete(begun.id)
        while not served.engine.running:
            await anext(stream)
        for _ in range(4):
            served.engine.step()
        last = [event async for event in stream][-1]
        assert last.type == "response.completed"
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(begun.id)


async def test_what_a_model_calls_is_kept_and_answered_in_the_next_turn(
    engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    tool: Any = {"type": "function", "name": "get_weather", "parameters": {"type": "object"}}
    async with serving(tool_engine(engine_of, files, limits, saying(CALL)), store=store) as served:
        client = openai_of(served)
        begun = await client.conversations.create()
        asked = await client.responses.create(**BODY, conversation=begun.id, tools=[tool], store=False)
        [call] = asked.output
        assert call.type == "function_call"
        output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
        await client.responses.create(model="tiny", input=[output], conversation=begun.id, tools=[tool])
        assert re.search("get_weather.*Oslo.*It rains", prompt_of(served), re.DOTALL)
        kinds = [item.type async for item in client.conversations.items.list(begun.id, order="asc")]
        assert kinds == ["message", "function_call", "function_call_output", "function_call"]
