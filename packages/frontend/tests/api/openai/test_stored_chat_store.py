"""Rows of stored chat completions: age, the size of the file and of pages, and several frontends."""

from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest

from packages.frontend.tests.api.responses.test_store import DAY, MANY, Clock, body
from tercet.frontend.api.openai.stored import store as store_module
from tercet.frontend.api.openai.stored.store import ChatFilter, Page, StoredChat, StoredChats
from tercet.frontend.api.responses.store import ResponseStore
from tercet.frontend.database import Database
from tercet.frontend.errors import BadRequestError, NotFoundError
from tercet.frontend.http.list_page import PageQuery

ALL = ChatFilter()
FIRST = PageQuery(100, None, "asc")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database(tmp_path / "kept.sqlite", MANY, 30 * DAY)
    yield opened
    await opened.close()


def chat(name: str, created: int = 0, size: int = 0, messages: int = 1) -> StoredChat:
    whole = orjson.dumps({"id": name, "filler": "x" * size})
    said = [orjson.dumps({"role": "user", "content": "x" * size})] * messages
    return StoredChat(id=name, created=created, model="tiny", metadata={"of": name}, body=whole, messages=said)


def names(page: Page) -> list[str]:
    return [each["id"] for each in orjson.loads(orjson.dumps(page))["data"]]


async def counts(database: Database) -> tuple[int, ...]:
    """Return the numbers of completions, entries of metadata and messages in the file."""
    tables = ("chat_completions", "chat_completion_metadata", "chat_completion_messages")
    query = f"SELECT {', '.join(f'(SELECT count(*) FROM {table})' for table in tables)}"
    found: tuple[int, ...] = await database.read(lambda each: each.execute(query).fetchone())
    return found


async def test_the_old_are_neither_found_nor_kept(database: Database, clock: Clock) -> None:
    store = StoredChats(database, clock)
    await store.save("me", chat("old", messages=3))
    clock.now += 31 * DAY
    for ask in (store.get, store.delete):
        with pytest.raises(NotFoundError):
            await ask("me", "old")
    with pytest.raises(NotFoundError):
        await store.messages("me", "old", FIRST)
    with pytest.raises(NotFoundError):
        await store.update("me", "old", {})
    with pytest.raises(BadRequestError):
        await store.page("me", ALL, PageQuery(1, "old", "asc"))
    assert names(await store.page("me", ALL, FIRST)) == []
    await store.save("me", chat("new"))
    assert await counts(database) == (1, 1, 1)


async def test_a_deleted_completion_leaves_nothing(database: Database, clock: Clock) -> None:
    store = StoredChats(database, clock)
    await store.save("me", chat("a", messages=2))
    await store.save("me", chat("b"))
    await store.delete("me", "a")
    assert await counts(database) == (1, 1, 1)
    assert names(await store.page("me", ALL, FIRST)) == ["b"]


async def test_order_is_that_of_the_time_they_began(database: Database, clock: Clock) -> None:
    store, other = StoredChats(database, clock), StoredChats(database, clock)
    for name, created in (("c", 3), ("a", 1), ("b1", 2), ("b2", 2), ("d", 4)):
        await store.save("me", chat(name, created))
    ordered = ["a", "b1", "b2", "c", "d"]
    for order, expected in (("asc", ordered), ("desc", ordered[::-1])):
        found: list[str] = []
        for has_more in (True, True, False):
            page = await other.page("me", ALL, PageQuery(2, found[-1] if found else None, order))
            found += names(page)
            assert page["has_more"] == has_more
        assert found == expected


async def test_pages_end_at_their_size(database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_PAGE_BYTES", 2000)
    store = StoredChats(database, clock)
    for name in ("a", "b", "c", "d"):
        await store.save("me", chat(name, size=1200, messages=4))
    pages = [await store.page("me", ALL, FIRST), await store.messages("me", "a", FIRST)]
    assert [(len(page["data"]), page["has_more"]) for page in pages] == [(2, True), (2, True)]
    rest = await store.page("me", ALL, PageQuery(100, "b", "asc"))
    assert (names(rest), rest["has_more"]) == (["c", "d"], False)


async def test_the_largest_owner_loses_its_oldest_completions(tmp_path: Path, clock: Clock) -> None:
    path, bound = tmp_path / "r.sqlite", 2 << 20
    database = Database(path, bound, 30 * DAY)
    store, responses = StoredChats(database, clock), ResponseStore(database, "a", clock)
    await responses.save("modest", body(filler="x" * 100_000), [])
    await store.save("modest", chat("modest", size=50_000))
    for number in range(60):
        clock.now += 1
        await store.save("much", chat(f"c{number}", number, size=50_000))
    assert (await responses.get("modest", "resp_1"))["id"] == "resp_1"
    await store.get("modest", "modest")
    await store.get("much", "c59")
    with pytest.raises(NotFoundError):
        await store.get("much", "c0")
    await database.close()
    assert path.stat().st_size < bound + 500_000
