"""The response store by itself: owners, leases, age and size. The test sets the clock."""

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tercet.frontend.api.responses import store as store_module
from tercet.frontend.api.responses.store import LEASE_SECONDS, LeaseLostError, ResponseStore
from tercet.frontend.api.sglang.session_store import SessionStore, Turn
from tercet.frontend.config.config import StoreConfig
from tercet.frontend.database import Database, StoreError
from tercet.frontend.errors import BadRequestError, NotFoundError
from tercet.protocol.system.private_files import state_directory

MANY = 1 << 30
DAY = 86400.0
Stores = Callable[[str], ResponseStore]


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def stores(tmp_path: Path, clock: Clock) -> AsyncIterator[Stores]:
    """Yield the stores of several frontends on one file."""
    opened: list[Database] = []

    def make(peer: str) -> ResponseStore:
        opened.append(Database(tmp_path / "responses.sqlite", MANY, 30 * DAY))
        return ResponseStore(opened[-1], peer, clock)

    yield make
    for database in opened:
        await database.close()


def body(name: str = "resp_1", status: str = "completed", **fields: Any) -> dict[str, Any]:
    output = [{"id": f"msg_{name}", "type": "message", "text": "yes"}] if status == "completed" else []
    whole = {"id": name, "model": "tiny", "status": status, "background": status == "queued", "output": output}
    return {**whole, "previous_response_id": None, "store": True, **fields}


def item(name: str) -> dict[str, Any]:
    return {"id": name, "type": "message"}


async def test_what_one_frontend_keeps_another_finds(stores: Stores) -> None:
    await stores("a").save("me", body(), [item("i1")])
    other = stores("b")
    assert await other.get("me", "resp_1") == body()
    assert await other.input_items("me", "resp_1") == [item("i1")]
    assert await other.item("me", "msg_resp_1") == body()["output"][0]


async def test_nothing_is_there_for_another_owner(stores: Stores) -> None:
    store = stores("a")
    await store.save("me", body(), [item("i1")])
    for ask in (store.get, store.delete, store.cancel, store.input_items):
        with pytest.raises(NotFoundError):
            await ask("you", "resp_1")
    with pytest.raises(BadRequestError) as lost:
        await store.history("you", "resp_1")
    assert lost.value.code == "previous_response_not_found"
    assert await store.item("you", "i1") is None
    await store.delete("me", "resp_1")
    with pytest.raises(NotFoundError):
        await store.get("me", "resp_1")
    assert await store.item("me", "i1") is None, "its items are gone with it"


async def test_history_is_everything_before(stores: Stores) -> None:
    store = stores("a")
    await store.save("me", body("r1"), [item("i1")])
    await store.save("me", body("r2", previous_response_id="r1"), [item("i2")])
    assert [each["id"] for each in await store.history("me", "r2")] == ["i1", "msg_r1", "i2", "msg_r2"]
    await store.delete("me", "r1")
    with pytest.raises(BadRequestError, match="'r1' not found"):
        await store.history("me", "r2")
    with pytest.raises(NotFoundError, match="'r1' not found"):
        await store.input_items("me", "r2")


async def test_history_that_is_too_long_is_not_read(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    store = stores("a")
    await store.save("me", body("r1"), [item("i" * 600)])
    await store.save("me", body("r2", previous_response_id="r1"), [item("j" * 600)])
    monkeypatch.setattr(store_module, "MAX_HISTORY_BYTES", 1000)
    assert len(await store.history("me", "r1")) == 2
    with pytest.raises(BadRequestError, match="more than 1000 bytes") as refused:
        await store.history("me", "r2")
    assert refused.value.param == "previous_response_id"


async def test_a_response_that_still_runs_is_no_history(stores: Stores) -> None:
    store = stores("a")
    await store.begin("me", body(status="queued"), [], {})
    with pytest.raises(BadRequestError):
        await store.history("me", "resp_1")


async def test_work_that_nobody_renews_is_taken_over_once(stores: Stores, clock: Clock) -> None:
    first, second, third = stores("a"), stores("b"), stores("c")
    lease = await first.begin("me", body(status="queued"), [item("i1")], {"seed": 5})
    await first.add(lease, 0, [b'{"n":0}'])
    assert await second.take_expired(["tiny"]) == []
    clock.now += LEASE_SECONDS - 1
    assert await first.renew([lease]) == []
    clock.now += 2
    assert await second.take_expired(["tiny"]) == [], "it was renewed"
    clock.now += LEASE_SECONDS
    assert await second.take_expired(["another model"]) == []
    for store in (second, third):
        assert await store.take_expired(["tiny"]) == [], "its frontend may be about to renew it"
    jobs = await asyncio.gather(second.take_expired(["tiny"]), third.take_expired(["tiny"]))
    [job] = [job for each in jobs for job in each]
    assert (job.owner, job.request, job.lease.run) == ("me", {"seed": 5}, 2)
    assert await second.all_events("resp_1") == [{"n": 0}]
    with pytest.raises(LeaseLostError):
        await first.add(lease, 1, [b"{}"])
    assert await first.renew([lease]) == [lease]


@pytest.mark.parametrize("set_by", [-3600.0, 3600.0])
async def test_clocks_that_are_set_take_no_work_from_who_lives_and_leave_none(
    stores: Stores, clock: Clock, set_by: float
) -> None:
    """Changed clocks look like a machine that was suspended for an hour."""
    first, second = stores("a"), stores("b")
    lease = await first.begin("me", body(status="queued"), [], {})
    clock.now += set_by
    assert await second.take_expired(["tiny"]) == []
    assert await first.renew([lease]) == []
    for _ in range(3):
        assert await second.take_expired(["tiny"]) == []
    clock.now -= set_by
    assert await second.take_expired(["tiny"]) == []
    [job] = await second.take_expired(["tiny"])
    assert job.lease.run == 2


async def test_work_given_up_is_there_at_once_and_does_not_count(stores: Stores) -> None:
    first, second = stores("a"), stores("b")
    lease = await first.begin("me", body(status="queued"), [], {})
    await first.release_lease(lease)
    [job] = await second.take_expired(["tiny"])
    assert job.lease.run == 1


async def test_a_cancelled_response_takes_no_more(stores: Stores) -> None:
    first, second = stores("a"), stores("b")
    lease = await first.begin("me", body(status="queued"), [], {})
    assert (await second.cancel("me", "resp_1"))["status"] == "cancelled"
    assert await first.renew([lease]) == [lease]
    with pytest.raises(LeaseLostError):
        await first.add(lease, 0, [b"{}"], body())
    assert (await first.get("me", "resp_1"))["status"] == "cancelled"
    assert await first.events("me", "resp_1", -1) == ([], False)


async def test_only_what_runs_in_the_background_is_cancelled(stores: Stores) -> None:
    store = stores("a")
    await store.save("me", body(), [])
    with pytest.raises(BadRequestError):
        await store.cancel("me", "resp_1")
    lease = await store.begin("me", body("resp_2", "queued"), [], {})
    await store.add(lease, 0, [], body("resp_2", background=True))
    assert (await store.cancel("me", "resp_2"))["status"] == "completed", "it ended before"


async def test_events_are_read_from_where_one_was(stores: Stores) -> None:
    store = stores("a")
    lease = await store.begin("me", body(status="queued"), [], {})
    await store.add(lease, 0, [b"0", b"1"])
    assert await store.events("me", "resp_1", -1) == ([b"0", b"1"], True)
    await store.add(lease, 2, [b"2"], body())
    assert await store.events("me", "resp_1", 0) == ([b"1", b"2"], False)
    assert [each["id"] for each in await store.history("me", "resp_1")] == ["msg_resp_1"]


async def test_the_old_are_forgotten(stores: Stores, clock: Clock) -> None:
    store = stores("a")
    await store.save("me", body("old"), [item("i1")])
    clock.now += 31 * DAY
    await store.save("me", body("new"), [])
    with pytest.raises(NotFoundError):
        await store.get("me", "old")
    assert (await store.get("me", "new"))["id"] == "new"


async def test_the_old_are_not_there_though_nothing_new_comes(stores: Stores, clock: Clock) -> None:
    store = stores("a")
    await store.save("me", body("old"), [item("i1")])
    lease = await store.begin("me", body("asked", "queued"), [], {})
    await store.add(lease, 0, [b"{}"], body("asked", background=True))
    clock.now += 29 * DAY
    assert (await store.get("me", "old"))["id"] == "old"
    clock.now += 2 * DAY
    for ask in (store.get, store.delete, store.cancel, store.input_items):
        with pytest.raises(NotFoundError):
            await ask("me", "old")
    with pytest.raises(NotFoundError):
        await store.events("me", "asked", -1)
    with pytest.raises(BadRequestError, match="not found"):
        await store.history("me", "old")
    assert await store.item("me", "i1") is None


async def test_the_bound_holds_for_what_events_add(tmp_path: Path, clock: Clock) -> None:
    path, bound = tmp_path / "r.sqlite", 2 << 20
    database = Database(path, bound, 30 * DAY)
    store = ResponseStore(database, "a", clock)
    leases = [await store.begin("me", body(f"r{number}", "queued"), [], {}) for number in range(8)]
    for number, lease in enumerate(leases):
        await store.add(lease, 0, [b"x" * 600_000])
        await store.add(lease, 1, [], body(lease.id, background=True))
        clock.now += 1
        with pytest.raises(NotFoundError) if number > 2 else contextlib.nullcontext():
            await store.get("me", "r0")
    assert (await store.get("me", "r7"))["status"] == "completed"
    await database.close()
    assert path.stat().st_size < bound + 1_500_000


async def test_the_file_keeps_to_its_bound_by_forgetting_the_oldest(tmp_path: Path, clock: Clock) -> None:
    path, bound = tmp_path / "r.sqlite", 2 << 20
    database = Database(path, bound, 30 * DAY)
    store = ResponseStore(database, "a", clock)
    for number in range(100):
        clock.now += 1
        await store.save("me", body(f"r{number}", filler="x" * 100_000), [])
    with pytest.raises(NotFoundError):
        await store.get("me", "r0")
    assert (await store.get("me", "r99"))["id"] == "r99"
    assert (await store.get("me", "r90"))["id"] == "r90", "what has room is kept"
    await database.close()
    assert path.stat().st_size < bound + 500_000


async def test_an_owner_that_writes_much_forgets_its_own(tmp_path: Path, clock: Clock) -> None:
    database = Database(tmp_path / "r.sqlite", 2 << 20, 30 * DAY)
    store, sessions = ResponseStore(database, "a", clock), SessionStore(database, clock)
    await store.save("modest", body("r-modest", filler="x" * 100_000), [])
    session = await sessions.open("modest", 100, None)
    for number in range(60):
        clock.now += 1
        if number % 2:
            await store.save("greedy", body(f"r{number}", filler="x" * 100_000), [])
        else:
            opened = await sessions.open("greedy", 100_000, None)
            await sessions.add("greedy", opened, Turn("rid", None, [7] * 25_000, [7]))
    assert (await store.get("modest", "r-modest"))["id"] == "r-modest"
    assert (await sessions.turn("modest", session, None))[0] == 100
    with pytest.raises(NotFoundError):
        await store.get("greedy", "r1")
    assert (await store.get("greedy", "r59"))["id"] == "r59"
    await database.close()


def test_many_processes_make_one_file(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom tercet.frontend.database import Database\n"
        "database = Database(Path(sys.argv[1]), 1 << 30, 1e9)\n"
        "work = lambda c: c.execute(\"INSERT INTO sessions VALUES ('me', ?, 1.0, 1)\", (sys.argv[2],))\n"
        "asyncio.run(database.run(work))\n"
    )
    path = tmp_path / "new" / "r.sqlite"
    parts = [subprocess.Popen([sys.executable, "-c", program, str(path), str(number)]) for number in range(4)]
    assert [part.wait(60) for part in parts] == [0] * 4
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (4,)
    connection.close()
    assert path.stat().st_mode & 0o077 == 0, "what clients said is nobody else's to read"


async def test_an_error_undoes_what_was_begun(tmp_path: Path) -> None:
    database = Database(tmp_path / "r.sqlite", MANY, DAY)

    def half(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO sessions VALUES ('me', 's', 1.0, 1)")
        raise BadRequestError("no")

    with pytest.raises(BadRequestError):
        await database.run(half)
    assert await database.read(lambda each: each.execute("SELECT count(*) FROM sessions").fetchone()) == (0,)
    with pytest.raises(OSError, match="store of responses"):
        await database.run(lambda each: each.execute("no such statement"))
    await database.close()


async def test_another_programs_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 77")
    connection.close()
    with pytest.raises(ValueError, match="format 77"):
        Database(path, MANY, DAY)
    (tmp_path / "text").write_text("no database at all, but long enough to be read as the head of one " * 3)
    with pytest.raises(OSError, match="text"):
        Database(tmp_path / "text", MANY, DAY)


def test_tables_of_another_program_are_left_alone(tmp_path: Path) -> None:
    """A file without a format version may belong to another program; tables of a later version do not."""
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE contacts (name TEXT)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ValueError, match="another program's database: it has a table 'contacts'"):
        Database(path, MANY, DAY)
    assert path.read_bytes() == before
    Database(tmp_path / "r.sqlite", MANY, DAY)
    with sqlite3.connect(tmp_path / "r.sqlite") as connection:
        connection.execute("CREATE TABLE of_a_later_version (name TEXT)")
    connection.close()
    Database(tmp_path / "r.sqlite", MANY, DAY)


def later_format(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()


DAMAGED = {
    "later": (later_format, "has format 2, and this version reads format 1"),
    "text": (
        lambda path: path.write_text("no database at all, but as long as the head of one. " * 9),
        "not a database",
    ),
    "directory": (lambda path: path.mkdir(), "Is a directory"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGED.values(), ids=DAMAGED.keys())
def test_an_unreadable_store_ends_the_start_only_if_it_was_configured(
    damage: Callable[[Path], object],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = state_directory() / "responses.sqlite"
    path.parent.mkdir()
    damage(path)
    assert Database.open(StoreConfig(response_store="auto")) is None
    assert caplog.text.count("no response is stored: ") == 1
    assert reason in caplog.text
    assert str(path) in caplog.text
    with pytest.raises((OSError, ValueError), match=f"^--response-store: .*{reason}") as raised:
        Database.open(StoreConfig(response_store=str(path)))
    assert "\n" not in str(raised.value)


def test_a_user_without_a_home_is_served_without_a_store(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_user(_: int) -> None:
        raise KeyError("no such user")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", "relative/ones/count/as/none")
    monkeypatch.setattr("pwd.getpwuid", no_user)
    assert Database.open(StoreConfig(response_store="auto")) is None
    assert "no response is stored: this user has no home directory" in caplog.text


@pytest.mark.parametrize("umask", [0o000, 0o077])
async def test_what_clients_said_is_private_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        database = Database(tmp_path / "above" / "tercet" / "r.sqlite", MANY, DAY)
        await database.run(lambda each: each.execute("INSERT INTO sessions VALUES ('me', 's', 1.0, 1)"))
    finally:
        os.umask(before)
    made = [tmp_path / "above", *(tmp_path / "above").rglob("*")]
    assert {path.name for path in made} > {"r.sqlite-wal", "r.sqlite-shm"}
    assert [path for path in made if path.stat().st_mode & 0o077] == []
    await database.close()


async def test_a_full_disk_fails_what_is_stored_and_nothing_later(tmp_path: Path, clock: Clock) -> None:
    database = Database(tmp_path / "r.sqlite", MANY, DAY)
    store = ResponseStore(database, "a", clock)
    await database.run(lambda each: each.execute("PRAGMA max_page_count = 40"))
    with pytest.raises(StoreError, match="does not answer: database or disk is full"):
        await store.save("me", body("large", filler="x" * 1_000_000), [])
    await store.save("me", body("small"), [])
    assert (await store.get("me", "small"))["id"] == "small"
    await database.close()


def test_the_default_file_may_be_impossible_and_a_chosen_one_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(blocked))
    assert state_directory() == blocked / "tercet"
    assert Database.open(StoreConfig(response_store="auto")) is None
    assert "no response is stored" in caplog.text
    with pytest.raises(OSError, match=r"^--response-store: .*/file'"):
        Database.open(StoreConfig(response_store=str(blocked / "r.sqlite")))
    assert Database.open(StoreConfig(response_store="none")) is None
