"""Fairness of the database under locks and load."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tercet.frontend import database as module
from tercet.frontend.database import Database, StoreError
from tercet.frontend.http.auth import set_resumed_caller


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "responses.sqlite"


@pytest.fixture
async def database(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Database]:
    monkeypatch.setattr(module, "_BUSY_SECONDS", 0.2)
    monkeypatch.setattr(module, "_TURN_SECONDS", 0.3)
    database = Database(path, 1 << 30, 1e9)
    yield database
    await database.close()


async def number(database: Database) -> int:
    found: int = await database.read(lambda each: each.execute("SELECT count(*) FROM sessions").fetchone()[0])
    return found


async def test_who_reads_does_not_wait_for_a_lock(database: Database, path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writes = [asyncio.ensure_future(database.run(lambda each: each.execute("SELECT 1"))) for _ in range(8)]
    await asyncio.sleep(0.05)
    began = time.monotonic()
    assert await number(database) == 0
    assert time.monotonic() - began < 0.15
    refused = await asyncio.gather(*writes, return_exceptions=True)
    assert {type(each) for each in refused} == {StoreError}
    assert {"does not answer" in str(each) or "is busy" in str(each) for each in refused} == {True}
    assert time.monotonic() - began < 1.5, "one after another they would have waited longer"
    other.execute("ROLLBACK")
    other.close()
    await database.run(lambda each: each.execute("INSERT INTO sessions VALUES ('a', 'b', 1, 1)"))
    assert await number(database) == 1


async def test_reading_changes_nothing(database: Database) -> None:
    with pytest.raises(StoreError, match="readonly"):
        await database.read(lambda each: each.execute("INSERT INTO sessions VALUES ('a', 'b', 1, 1)"))


async def test_keys_take_turns(database: Database) -> None:
    order: list[str] = []

    async def ask(owner: str) -> None:
        set_resumed_caller(owner)
        await database.run(lambda _: order.append(owner))

    await asyncio.gather(*(asyncio.create_task(ask(owner)) for owner in "aaaaab"))
    assert "".join(order) == "aabaaa"


async def test_who_gives_up_leaves_the_turn_to_others(database: Database) -> None:
    slow = asyncio.ensure_future(database.run(lambda _: time.sleep(0.1)))
    await asyncio.sleep(0)
    gone = asyncio.ensure_future(database.run(lambda _: "gone"))
    stays = asyncio.ensure_future(database.run(lambda _: "stays"))
    await asyncio.sleep(0.01)
    gone.cancel()
    assert await stays == "stays"
    await slow
