"""Rows of conversations: age, size limit, and files of other versions. The test sets the clock."""

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from packages.frontend.tests.api.responses.test_store import DAY, MANY, Clock, body, item
from tercet.frontend.api.responses import conversation_store
from tercet.frontend.api.responses.conversation_store import ConversationStore
from tercet.frontend.api.responses.store import ResponseStore
from tercet.frontend.database import Database
from tercet.frontend.errors import BadRequestError, NotFoundError
from tercet.frontend.http.list_page import PageQuery

HOUR = 3600.0
OLDER = """
PRAGMA user_version = 1;
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created REAL NOT NULL, model TEXT NOT NULL, status TEXT NOT NULL,
    background INTEGER NOT NULL, previous TEXT, request BLOB NOT NULL, body BLOB NOT NULL, frontend TEXT NOT NULL,
    lease REAL NOT NULL, runs INTEGER NOT NULL
) STRICT;
CREATE TABLE items (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE, place INTEGER NOT NULL, id TEXT NOT NULL,
    given INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (response, place)
) STRICT, WITHOUT ROWID;
"""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = Database(tmp_path / "kept.sqlite", MANY, 30 * DAY)
    yield opened
    await opened.close()


async def counts(database: Database) -> tuple[int, int]:
    """Return the number of conversations and of items in the file."""
    query = "SELECT (SELECT count(*) FROM conversations), (SELECT count(*) FROM conversation_items)"
    return await database.read(lambda each: each.execute(query).fetchone())


async def test_it_is_forgotten_when_nobody_asks_for_it(database: Database, clock: Clock) -> None:
    store = ConversationStore(database, clock)
    used, unused = [(await store.create("me", [item("a")], {}))["id"] for _ in range(2)]
    responses = ResponseStore(database, "a", clock)
    for _ in range(3):
        clock.now += 20 * DAY
        await store.get("me", used)
    for ask in (store.get, store.delete, store.snapshot):
        with pytest.raises(NotFoundError):
            await ask("me", unused)
    assert (await store.snapshot("me", used)).items == [item("a")]
    await responses.save("me", body("r"), [])
    assert await counts(database) == (1, 1)
    assert await responses.item("me", "a") == item("a")
    clock.now += 30 * DAY + 1
    assert await responses.item("me", "a") is None, "though it is in the file"


async def test_what_a_response_adds_is_a_use(database: Database, clock: Clock) -> None:
    store, responses = ConversationStore(database, clock), ResponseStore(database, "a", clock)
    begun = (await store.create("me", [], {}))["id"]
    clock.now += 29 * DAY
    await responses.save("me", body("r", conversation={"id": begun}, store=False), [item("i")])
    clock.now += 29 * DAY
    assert [each["id"] for each in (await store.snapshot("me", begun)).items] == ["i", "msg_r"]
    with pytest.raises(NotFoundError):
        await responses.get("me", "r")


async def test_places_are_never_given_twice(database: Database, clock: Clock) -> None:
    store, responses = ConversationStore(database, clock), ResponseStore(database, "a", clock)
    begun = (await store.create("me", [item("a"), item("b")], {}))["id"]
    past = await store.snapshot("me", begun)
    assert (past.items, past.end) == ([item("a"), item("b")], 2)
    for name in ("a", "b"):
        await store.delete_item("me", begun, name)
    assert (await store.snapshot("me", begun)).size == 0
    await store.add("me", begun, [item("c")])
    await responses.save("me", body("r", conversation={"id": begun}), [item("i")], past.end)
    assert [each["id"] for each in await responses.input_items("me", "r")] == ["i"], "it never saw the third"
    assert [each["id"] for each in await responses.history("me", "r")] == ["i", "msg_r"]
    after = await store.snapshot("me", begun)
    assert [each["id"] for each in after.items] == ["c", "i", "msg_r"]
    assert after.size == sum(len(orjson.dumps(each)) for each in after.items)


async def test_what_a_response_says_may_fill_it_and_the_next_is_refused(
    database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_store, "MAX_HISTORY_BYTES", 1000)
    store, responses = ConversationStore(database, clock), ResponseStore(database, "a", clock)
    begun = (await store.create("me", [], {}))["id"]
    await responses.save("me", body("r", conversation={"id": begun}), [item("i" * 1000)])
    with pytest.raises(BadRequestError, match="at most 1000 bytes") as full:
        await store.snapshot("me", begun)
    assert full.value.param == "conversation"
    assert len((await store.items("me", begun, PageQuery(20, None, "asc")))["data"]) == 2, "it can be read"
    await store.delete_item("me", begun, "i" * 1000)
    assert [each["id"] for each in (await store.snapshot("me", begun)).items] == ["msg_r"]


async def test_the_oldest_use_is_forgotten_first_whatever_it_is_of(tmp_path: Path, clock: Clock) -> None:
    database = Database(tmp_path / "kept.sqlite", 2 << 20, 30 * DAY)
    store, responses = ConversationStore(database, clock), ResponseStore(database, "a", clock)
    other = (await store.create("modest", [item("m")], {}))["id"]
    stale, fresh = [(await store.create("me", [item("a")], {}))["id"] for _ in range(2)]
    for number in range(60):
        clock.now += 2 * HOUR
        await store.get("me", fresh)
        await responses.save("me", body(f"r{number}", filler="x" * 100_000), [])
    for lost in (store.get("me", stale), responses.get("me", "r0")):
        with pytest.raises(NotFoundError):
            await lost
    assert (await store.get("me", fresh))["id"] == fresh
    assert (await store.get("modest", other))["id"] == other
    for number in range(30):
        clock.now += 2 * HOUR
        await store.add("me", fresh, [{**item(f"y{number}"), "text": "y" * 50_000}])
    with pytest.raises(NotFoundError):
        await responses.get("me", "r50")
    assert (await store.get("modest", other))["id"] == other
    await database.close()


async def test_a_file_of_an_older_version_is_gone_on_with(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "older.sqlite"
    told: dict[str, Any] = {**body("old"), "store": True}
    running = {**body("asked", "queued"), "store": True}
    with sqlite3.connect(path) as connection:
        connection.executescript(OLDER)
        for each, request in ((told, {}), (running, {"seed": 5})):
            row = (each["id"], "me", clock.now, "tiny", each["status"], each["background"], None)
            values = (*row, orjson.dumps(request), orjson.dumps(each), "gone", 0.0, 1)
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        rows = [("asked", 0, "i", 1, orjson.dumps(item("i")))]
        connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", rows)
    connection.close()
    database = Database(path, MANY, 30 * DAY)
    store, responses = ConversationStore(database, clock), ResponseStore(database, "a", clock)
    assert await responses.get("me", "old") == told
    assert await responses.history("me", "old") == []
    [job] = await responses.take_expired(["tiny"])
    assert (job.request, job.given) == ({"seed": 5}, [item("i")])
    await responses.add(job.lease, 0, [], body("asked", background=True))
    assert [each["id"] for each in await responses.history("me", "asked")] == ["i", "msg_asked"]
    begun = (await store.create("me", [item("a")], {"topic": "tea"}))["id"]
    assert (await store.get("me", begun))["metadata"] == {"topic": "tea"}
    await database.close()


async def test_pages_and_items_carry_the_stored_text_without_parsing_it(database: Database, clock: Clock) -> None:
    store = ConversationStore(database, clock)
    begun = (await store.create("me", [item("a")], {}))["id"]
    spaced = b'{"id": "a",  "type": "message"}'
    await database.run(lambda each: each.execute("UPDATE conversation_items SET data = ?", (spaced,)))
    page = await store.items("me", begun, PageQuery(20, None, "asc"))
    assert orjson.dumps(page) == b'{"object":"list","data":[%s],"first_id":"a","last_id":"a","has_more":false}' % spaced
    assert orjson.dumps(await store.item("me", begun, "a")) == spaced
