"""/v1/conversations through OpenAI's client: storage, lists, ownership and refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from tercet.frontend.api.responses import conversation_store
from tercet.frontend.config.config import HttpConfig, StoreConfig
from tercet.frontend.testing import FakeEngine, Served, serving

EngineOf = Callable[..., FakeEngine]
OpenAIOf = Callable[..., openai.AsyncOpenAI]
HttpOf = Callable[[Served], httpx2.AsyncClient]

MESSAGE: Any = {"type": "message", "role": "user", "content": "hello"}


def message_item(text: str, **fields: Any) -> Any:
    return {**MESSAGE, "content": text, **fields}


@pytest.fixture
def store(tmp_path: Path) -> StoreConfig:
    return StoreConfig(response_store=str(tmp_path / "kept.sqlite"))


async def test_a_conversation_is_made_told_of_changed_and_forgotten(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        made = await client.conversations.create(metadata={"topic": "tea"})
        assert made.id.startswith("conv_")
        assert (made.object, made.metadata) == ("conversation", {"topic": "tea"})
        assert await client.conversations.retrieve(made.id) == made
        other = await client.conversations.create()
        assert other.metadata == {}
        changed = await client.conversations.update(made.id, metadata={"with": "milk"})
        assert (changed.id, changed.created_at, changed.metadata) == (made.id, made.created_at, {"with": "milk"})
        assert (await client.conversations.update(made.id, metadata=None)).metadata == {}
        gone = await client.conversations.delete(made.id)
        assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
        assert await client.conversations.retrieve(other.id) == other
        for ask in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
            with pytest.raises(openai.NotFoundError) as lost:
                await ask(made.id)
            assert (lost.value.param, lost.value.type) == ("conversation_id", "invalid_request_error")


async def test_items_of_every_kind_are_kept_in_order_and_as_responses_keep_them(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    given: list[Any] = [
        MESSAGE,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "a b"},
        {"role": "assistant", "content": "It rains."},
    ]
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        made = await client.conversations.create(items=given[:3])
        added = await client.conversations.items.create(made.id, items=given[3:])
        assert (added.object, added.has_more) == ("list", False)
        assert [added.first_id, added.last_id] == [added.data[0].id, added.data[-1].id]
        listed = [item async for item in client.conversations.items.list(made.id, order="asc")]
        assert listed[3:] == added.data
        assert [item.type for item in listed] == [item.get("type", "message") for item in given]
        assert listed[0].content[0].to_dict() == {"type": "input_text", "text": "hello"}  # type: ignore[union-attr,index]
        assert listed[6].content[0].type == "output_text"  # type: ignore[union-attr,index]
        assert [item.id.split("_")[0] for item in listed] == ["msg", "rs", "fc", "fco", "ctc", "ctco", "msg"]  # type: ignore[union-attr]
        for item in listed:
            assert item.id is not None
            assert await client.conversations.items.retrieve(item.id, conversation_id=made.id) == item


async def test_pages_go_either_way_from_any_item(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    names = [f"m{number}" for number in range(25)]
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        made = await client.conversations.create(items=[message_item(name, id=name) for name in names[:20]])
        await client.conversations.items.create(made.id, items=[message_item(name, id=name) for name in names[20:]])
        newest = await client.conversations.items.list(made.id)
        assert [item.id for item in newest.data] == names[:4:-1], "twenty, and the newest first"
        assert (newest.has_more, newest.last_id) == (True, "m5")
        assert [item.id async for item in client.conversations.items.list(made.id, limit=3)] == names[::-1]
        listing = client.conversations.items.list(made.id, limit=7, order="asc", after="m3")
        assert [item.id async for item in listing] == names[4:]
        last = await client.conversations.items.list(made.id, limit=2, after="m2")
        assert ([item.id for item in last.data], last.has_more) == (["m1", "m0"], False)
        empty = await client.conversations.items.list(made.id, after="m0")
        assert (empty.data, empty.has_more) == ([], False)
        refused: list[tuple[dict[str, Any], str]] = [
            ({"limit": 0}, "limit"),
            ({"limit": 101}, "limit"),
            ({"order": "up"}, "order"),
            ({"after": "m99"}, "after"),
        ]
        for fields, param in refused:
            with pytest.raises(openai.BadRequestError) as error:
                await client.conversations.items.list(made.id, **fields)
            assert error.value.param == param


async def test_an_item_is_taken_out(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        made = await client.conversations.create(items=[message_item(name, id=name) for name in ("a", "b", "c")])
        assert await client.conversations.items.delete("c", conversation_id=made.id) == made
        await client.conversations.items.create(made.id, items=[message_item("d", id="d")])
        listed = await client.conversations.items.list(made.id, order="asc", after="b")
        assert [item.id for item in listed.data] == ["d"]
        for ask in (client.conversations.items.retrieve, client.conversations.items.delete):
            with pytest.raises(openai.NotFoundError) as lost:
                await ask("c", conversation_id=made.id)
            assert lost.value.param == "item_id"


async def test_item_references_resolve_to_responses_and_other_conversations(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        answer = await client.responses.create(model="tiny", input="hello")
        first = await client.conversations.create(items=[message_item("elsewhere", id="other")])
        references: Any = [{"type": "item_reference", "id": each} for each in (answer.output[0].id, "other")]
        made = await client.conversations.create(items=references)
        listed = await client.conversations.items.list(made.id, order="asc")
        assert listed.data[0].to_dict()["content"] == answer.output[0].to_dict()["content"]
        assert listed.data[1] == await client.conversations.items.retrieve("other", conversation_id=first.id)
        with pytest.raises(openai.BadRequestError) as lost:
            await client.conversations.create(items=[{"type": "item_reference", "id": "none"}])
        assert lost.value.param == "items[0].id"


async def test_a_conversation_belongs_to_its_key(engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig) -> None:
    async with serving(engine_of(), HttpConfig(api_key=("mine", "yours")), store=store) as served:
        mine, yours = openai_of(served, api_key="mine"), openai_of(served, api_key="yours")
        made = await mine.conversations.create(items=[message_item("secret", id="secret")])
        conversations, items = yours.conversations, yours.conversations.items
        for ask in (
            conversations.retrieve(made.id),
            conversations.update(made.id, metadata={}),
            conversations.delete(made.id),
            items.create(made.id, items=[MESSAGE]),
            items.retrieve("secret", conversation_id=made.id),
            items.delete("secret", conversation_id=made.id),
            yours.responses.create(model="tiny", input="hello", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await ask
        with pytest.raises(openai.NotFoundError):
            await items.list(made.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            await conversations.create(items=[{"type": "item_reference", "id": "secret"}])
        assert [item.id async for item in mine.conversations.items.list(made.id)] == ["secret"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": [MESSAGE] * 21}, "items"),
        ("", {"items": [{"type": "computer_call", "id": "1"}]}, "items[0]"),
        ("", {"items": [MESSAGE, {"role": "user", "content": [{"type": "input_image"}]}]}, "items[1].content[0]"),
        ("", {"items": [{"role": "user"}]}, "items[0].content"),
        ("", {"items": [message_item("a", id="a"), message_item("b", id="a")]}, "items[1].id"),
        ("", {"metadata": {str(place): "" for place in range(17)}}, "metadata"),
        ("", {"metadata": {"k": "v" * 513}}, "metadata.k"),
        ("", {"nonsense": 1}, "nonsense"),
        ("/ID", {}, "metadata"),
        ("/ID", {"metadata": {"k": 1}}, "metadata.k"),
        ("/ID/items", {"items": []}, "items"),
        ("/ID/items", {"items": [MESSAGE] * 21}, "items"),
        ("/ID/items", {}, "items"),
        ("/ID/items", {"items": [MESSAGE, message_item("a", id="there")]}, "items[1].id"),
    ],
)
async def test_what_cannot_be_taken_is_refused_by_name_and_leaves_nothing(
    path: str, body: dict[str, Any], param: str, engine_of: EngineOf, http_of: HttpOf, store: StoreConfig
) -> None:
    async with serving(engine_of(), store=store) as served:
        http = http_of(served)
        made = (await http.post("/v1/conversations", json={"items": [message_item("a", id="there")]})).json()["id"]
        refused = await http.post(f"/v1/conversations{path.replace('ID', made)}", json=body)
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param
        listed = (await http.get(f"/v1/conversations/{made}/items")).json()
        assert [item["id"] for item in listed["data"]] == ["there"]
        assert served.stores is not None
        count = "SELECT count(*) FROM conversations"
        assert await served.stores._database.read(lambda each: each.execute(count).fetchone()) == (1,)


async def test_a_full_conversation_takes_items_again_after_a_deletion(
    engine_of: EngineOf, openai_of: OpenAIOf, store: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_store, "MAX_HISTORY_BYTES", 1000)
    async with serving(engine_of(), store=store) as served:
        client = openai_of(served)
        with pytest.raises(openai.BadRequestError, match="at most 1000 bytes") as full:
            await client.conversations.create(items=[message_item("x" * 1000)])
        assert full.value.param == "items"
        made = await client.conversations.create(items=[message_item("x" * 500, id="long")])
        with pytest.raises(openai.BadRequestError, match="at most 1000 bytes") as full:
            await client.conversations.items.create(made.id, items=[message_item("x" * 500)])
        assert full.value.param == "items"
        with pytest.raises(openai.BadRequestError, match="at most 1000 bytes") as full:
            await client.responses.create(model="tiny", input="x" * 500, conversation=made.id)
        assert full.value.param == "input"
        await client.conversations.items.delete("long", conversation_id=made.id)
        await client.conversations.items.create(made.id, items=[message_item("x" * 500)])


async def test_without_a_store_there_are_no_conversations(engine_of: EngineOf, openai_of: OpenAIOf) -> None:
    async with serving(engine_of()) as served:
        client = openai_of(served)
        conversations, items = client.conversations, client.conversations.items
        for ask in (
            conversations.create(),
            conversations.retrieve("conv_1"),
            conversations.update("conv_1", metadata={}),
            conversations.delete("conv_1"),
            items.create("conv_1", items=[MESSAGE]),
            items.retrieve("i", conversation_id="conv_1"),
            items.delete("i", conversation_id="conv_1"),
        ):
            with pytest.raises(openai.NotFoundError, match="without --response-store"):
                await ask
        with pytest.raises(openai.NotFoundError, match="without --response-store"):
            await items.list("conv_1")
        with pytest.raises(openai.NotFoundError) as lost:
            await client.responses.create(model="tiny", input="hello", conversation="conv_1")
        assert lost.value.param == "conversation"
