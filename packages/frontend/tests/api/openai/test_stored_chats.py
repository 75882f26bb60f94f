"""Stored chat completions through OpenAI's client: storage, lists, messages, ownership and refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from packages.frontend.tests.api.openai.test_chat_custom_tools import NAMED, PYTHON, WRITTEN, hermes
from packages.frontend.tests.api.openai.tool_chat import BODY, TWO, WEATHER, EngineOf, HttpOf, OpenAIOf, saying
from packages.frontend.tests.api.openai.tool_chat import tool_engine as engine_with_tools
from tercet.frontend.config.config import HttpConfig, ServingConfig, StoreConfig
from tercet.frontend.database import Database, StoreError
from tercet.frontend.testing import FakeEngine, Script, serving
from tercet.protocol.messages.values import FinishReason, FinishType, ModelLimits

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "store": True}
END = FinishReason(FinishType.STOP, matched=258)
LENGTH = FinishReason(FinishType.LENGTH)


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept.sqlite"))


@pytest.fixture
def model_saying(engine_of: EngineOf, files: dict[str, bytes], limits: ModelLimits) -> Callable[[Script], FakeEngine]:
    return lambda script: engine_with_tools(engine_of, files, limits, script)


def plain(answer: Any) -> Any:
    """Return an answer without ids and times, which differ between two equal requests."""
    text = json.loads(json.dumps(answer.to_dict(), default=str))
    for name in ("id", "created", "request_id"):
        del text[name]
    for choice in text["choices"]:
        for call in choice["message"].get("tool_calls", []):
            assert call.pop("id").startswith("call_")
    return text


REASONED: dict[str, Any] = {"tools": openai.NOT_GIVEN}
CUSTOM: dict[str, Any] = {"tools": [PYTHON], "tool_choice": NAMED}
FUNCTIONS: dict[str, Any] = {"tools": openai.NOT_GIVEN, "functions": [WEATHER["function"]]}
IDS: dict[str, Any] = {"extra_body": {"return_token_ids": True}}
ANSWERS = [
    pytest.param("Hello world, how are you?", END, {"n": 2, "seed": 5, "temperature": 0.5, "user": "u"}, id="text"),
    pytest.param("Hello world", LENGTH, {"logprobs": True, "top_logprobs": 1, **IDS}, id="logprobs"),
    pytest.param(TWO, END, {"n": 2}, id="calls"),
    pytest.param(f"Let me look.\n{TWO}", END, {"logprobs": True}, id="text and calls"),
    pytest.param(TWO[:40], LENGTH, {}, id="a call that is cut off"),
    pytest.param(TWO, END, FUNCTIONS, id="functions"),
    pytest.param(hermes(WRITTEN), END, CUSTOM, id="custom"),
    pytest.param("<think>Hm.</think>Yes.", END, REASONED, id="reasoning"),
    pytest.param("<think>Hm.", LENGTH, {}, id="reasoning alone"),
]


@pytest.mark.parametrize(("text", "finish", "options"), ANSWERS)
async def test_streamed_and_whole_completions_are_stored_alike(
    model_saying: Callable[..., FakeEngine],
    openai_of: OpenAIOf,
    store: StoreConfig,
    text: str,
    finish: FinishReason,
    options: dict[str, Any],
) -> None:
    asked = {**BODY, "max_tokens": 1000, **options, "store": True, "metadata": {"a": "b"}}
    config = ServingConfig(tool_call_parser="hermes", reasoning_parser="deepseek_r1")
    async with serving(model_saying(saying(text, finish)), store=store, config=config) as served:
        client = openai_of(served)
        made = await client.chat.completions.create(**asked)
        names = {chunk.id async for chunk in await client.chat.completions.create(**asked, stream=True)}
        whole = await client.chat.completions.retrieve(made.id)
        streamed = await client.chat.completions.retrieve(names.pop())
    assert made.to_dict().items() <= whole.to_dict().items()
    assert whole.metadata == {"a": "b"}
    assert plain(streamed) == plain(whole)


async def test_a_streamed_call_is_stored_with_the_id_that_was_sent(
    model_saying: Callable[..., FakeEngine], openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(model_saying(saying(TWO, END)), store=store) as served:
        client = openai_of(served)
        async with client.chat.completions.stream(**BODY, store=True) as stream:
            sent = await stream.get_final_completion()
        kept = await client.chat.completions.retrieve(sent.id)
    calls = kept.choices[0].message.tool_calls
    assert calls is not None
    assert [call.id for call in calls] == [call.id for call in sent.choices[0].message.tool_calls or []]


async def test_a_stored_completion_can_be_changed_and_deleted(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        chats = openai_of(served).chat.completions
        made = await chats.create(**CHAT, metadata={"topic": "tea"})
        other = await chats.create(**CHAT)
        for unstored in ({**CHAT, "store": False}, {**CHAT, "store": None}):
            with pytest.raises(openai.NotFoundError):
                await chats.retrieve((await chats.create(**unstored)).id)
        changed = await chats.update(made.id, metadata={"with": "milk"})
        assert (changed.id, changed.choices, changed.metadata) == (made.id, made.choices, {"with": "milk"})
        assert await chats.retrieve(made.id) == changed
        assert (await chats.update(made.id, metadata=None)).metadata == {}
        gone = await chats.delete(made.id)
        assert (gone.id, gone.object, gone.deleted) == (made.id, "chat.completion.deleted", True)
        assert [each.id async for each in chats.list()] == [other.id]
        for ask in (chats.retrieve, chats.delete, chats.messages.list):
            with pytest.raises(openai.NotFoundError) as lost:
                await ask(made.id)
            assert (lost.value.param, lost.value.type) == ("completion_id", "invalid_request_error")
        with pytest.raises(openai.NotFoundError):
            await chats.update(made.id, metadata={})


async def test_lists_are_filtered_ordered_and_in_pages(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    odd = {'quote " \\ \n': "ü ' 🙂", "[x]": "", "a&b=c": "1"}
    tags: list[Any] = [{"n": "0"}, {"n": "1", "k": "v"}, odd, None, {"n": "1", "k": "w"}]
    config = ServingConfig(served_model_name=("tiny", "other"))
    async with serving(engine_of(), store=store, config=config, names=("tiny", "other")) as served:
        chats = openai_of(served).chat.completions
        made = [(await chats.create(**CHAT, metadata=each)).id for each in tags]
        other = (await chats.create(**{**CHAT, "model": "other"})).id
        assert [each.id async for each in chats.list()] == [*made, other]
        assert [each.id async for each in chats.list(limit=2, order="desc")] == [other, *reversed(made)]
        assert [each.id async for each in chats.list(model="other")] == [other]
        assert [each.id async for each in chats.list(model="tiny", limit=1)] == made
        assert [each.id async for each in chats.list(metadata={"n": "1"})] == [made[1], made[4]]
        assert [each.id async for each in chats.list(metadata={"n": "1", "k": "w"})] == [made[4]]
        assert [each.id async for each in chats.list(metadata=odd, model="tiny")] == [made[2]]
        assert not [each async for each in chats.list(metadata={"n": "2"})]
        page = await chats.list(limit=2, after=made[1])
        assert ([each.id for each in page.data], page.has_more) == (made[2:4], True)
        assert page.model_extra == {"object": "list", "first_id": made[2], "last_id": made[3]}
        assert not (await chats.list(after=other)).has_more


async def test_messages_are_those_of_the_request(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    parts = [{"type": "text", "text": "what "}, {"type": "text", "text": "time?"}]
    asked: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    async with serving(engine_of(), store=store) as served:
        chats = openai_of(served, strict=False).chat.completions
        made = await chats.create(**{**CHAT, "messages": asked})
        found = [each.to_dict() async for each in chats.messages.list(made.id, limit=3)]
        assert [each["id"] for each in found] == [f"{made.id}-{place}" for place in range(4)]
        given = [{**each, "content": each.get("content"), "content_parts": None} for each in asked]
        given[1] |= {"content": "what time?", "content_parts": parts}
        for message, expected in zip(found, given, strict=True):
            assert message.items() >= expected.items()
            assert message["refusal"] is None
        newest = await chats.messages.list(made.id, order="desc", limit=1)
        assert ([each.role for each in newest.data], newest.has_more) == (["tool"], True)
        with pytest.raises(openai.BadRequestError) as unknown:
            await chats.messages.list(made.id, after=f"{made.id}-04")
        assert unknown.value.param == "after"


async def test_a_completion_belongs_to_its_key(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("mine", "yours")), store=store) as served:
        mine, yours = (openai_of(served, api_key=key, strict=False).chat.completions for key in ("mine", "yours"))
        made = await mine.create(**CHAT, metadata={"a": "b"})
        for ask in (yours.retrieve, yours.delete, yours.messages.list):
            with pytest.raises(openai.NotFoundError):
                await ask(made.id)
        with pytest.raises(openai.NotFoundError):
            await yours.update(made.id, metadata={})
        with pytest.raises(openai.BadRequestError):
            await yours.list(after=made.id)
        assert not [each async for each in yours.list(metadata={"a": "b"})]
        assert [each.id async for each in mine.list()] == [made.id]


REFUSED = [
    ("GET", "?limit=0", {}, "limit"),
    ("GET", "?limit=101", {}, "limit"),
    ("GET", "?order=up", {}, "order"),
    ("GET", "?after=chatcmpl-none", {}, "after"),
    ("GET", "?" + "&".join(f"metadata[{n}]=x" for n in range(17)), {}, "metadata"),
    ("POST", "/chatcmpl-none", {}, "metadata"),
    ("POST", "/chatcmpl-none", {"metadata": {"a": 1}}, "metadata.a"),
    ("POST", "/chatcmpl-none", {"metadata": {}, "more": 1}, "more"),
    ("POST", "", {**CHAT, "metadata": {"k" * 65: ""}}, "metadata"),
]


async def test_refusals_name_the_parameter(engine_of: EngineOf, http_of: HttpOf, store: StoreConfig) -> None:
    async with serving(engine_of(), store=store) as served:
        for method, path, body, param in REFUSED:
            answer = await http_of(served).request(method, f"/v1/chat/completions{path}", json=body)
            assert answer.status_code == 400, path
            assert answer.json()["error"]["param"].partition(".k")[0] == param, path


async def test_without_a_store_only_storing_is_refused(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        chats = openai_of(served).chat.completions
        with pytest.raises(openai.BadRequestError) as refused:
            await chats.create(**CHAT)
        assert (refused.value.param, refused.value.code) == ("store", "unsupported_parameter")
        await chats.create(**{**CHAT, "store": False, "metadata": {"a": "b"}})
        for ask in (chats.retrieve, chats.delete):
            with pytest.raises(openai.NotFoundError, match="response-store"):
                await ask("chatcmpl-none")
        with pytest.raises(openai.NotFoundError, match="response-store"):
            await chats.list()


async def test_a_completion_that_cannot_be_stored_fails(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(self: Database, work: object) -> None:
        raise StoreError("The store of responses does not answer: database or disk is full.")

    async with serving(engine_of(), store=store) as served:
        monkeypatch.setattr(Database, "run", full)
        chats = openai_of(served).chat.completions
        with pytest.raises(openai.InternalServerError, match="disk is full"):
            await chats.create(**CHAT)
        with pytest.raises(openai.APIError, match="disk is full"):
            async for _ in await chats.create(**CHAT, stream=True):
                pass
        assert (await chats.create(**{**CHAT, "store": False})).choices[0].message.content == "Hello world!"
