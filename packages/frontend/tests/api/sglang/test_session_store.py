"""The session store by itself: age and size. The test sets the clock."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tercet.frontend.api.sglang.session_store import SessionStore, Turn
from tercet.frontend.database import Database
from tercet.frontend.errors import NotFoundError

BOUND = 2 << 20
DAY = 86400.0


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[SessionStore]:
    database = Database(tmp_path / "r.sqlite", BOUND, 30 * DAY)
    yield SessionStore(database, clock)
    await database.close()


async def test_an_old_session_is_not_there_though_nothing_new_comes(store: SessionStore, clock: Clock) -> None:
    await store.open("me", 100, "s")
    clock.now += 29 * DAY
    assert (await store.turn("me", "s", None))[0] == 100
    clock.now += 2 * DAY
    with pytest.raises(NotFoundError):
        await store.turn("me", "s", None)
    with pytest.raises(NotFoundError):
        await store.close("me", "s")


async def test_the_bound_holds_for_what_turns_add(store: SessionStore, clock: Clock, tmp_path: Path) -> None:
    for name in ("old", "new"):
        await store.open("me", 10**6, name)
        clock.now += 1
    for number in range(8):
        await store.add("me", "old", Turn(f"r{number}", None, [7] * 50_000, []))
    await store.add("me", "new", Turn("r", None, [7] * 50_000, []))
    for number in range(8, 12):
        await store.add("me", "old", Turn(f"r{number}", None, [7] * 50_000, []))
    with pytest.raises(NotFoundError):
        await store.turn("me", "old", None)
    _, turn = await store.turn("me", "new", "r")
    assert turn is not None
    assert len(turn.prompt_ids) == 50_000
    assert (tmp_path / "r.sqlite").stat().st_size < BOUND + 500_000
