"""Equal behavior of both adapter stores."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tercet.frontend.database import Database
from tercet.frontend.errors import BadRequestError
from tercet.frontend.lora.store import Adapter, AdapterNames, AdaptersInFile, AdaptersInMemory
from tercet.protocol.messages.values import LoRAAdapter

DAY = 86400.0


@contextlib.asynccontextmanager
async def in_file(path: Path) -> AsyncIterator[AdaptersInFile]:
    database = Database(path, 2 << 20, 30 * DAY)
    yield AdaptersInFile(database)
    await database.close()


@pytest.fixture(params=["memory", "file"])
async def names(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[AdapterNames]:
    if request.param == "memory":
        yield AdaptersInMemory()
        return
    async with in_file(tmp_path / "r.sqlite") as opened:
        yield opened


def adapter(name: str, base: str = "a", sha256: str = "1") -> Adapter:
    return Adapter(name, base, LoRAAdapter(f"/{name}", sha256), 7)


async def test_a_name_stands_for_what_it_was_last_given(names: AdapterNames) -> None:
    assert await names.find("haiku", ["a"]) is None
    await names.put(adapter("haiku"), ["a"])
    assert await names.find("haiku", ["a"]) == adapter("haiku")
    await names.put(adapter("haiku", sha256="2"), ["a"])
    assert await names.all(["a"]) == [adapter("haiku", sha256="2")]


async def test_a_name_that_is_taken_away_is_gone(names: AdapterNames) -> None:
    await names.put(adapter("haiku"), ["a"])
    await names.put(adapter("sonnet"), ["a"])
    assert await names.remove("haiku", ["a"]) == adapter("haiku")
    assert await names.remove("haiku", ["a"]) is None
    assert await names.find("haiku", ["a"]) is None
    assert await names.all(["a"]) == [adapter("sonnet")]


async def test_a_name_is_of_one_of_the_models_that_are_served_together(names: AdapterNames) -> None:
    await names.put(adapter("haiku", "a"), ["a", "b"])
    await names.put(adapter("haiku", "b"), ["a", "b"])
    assert await names.all(["a", "b"]) == [adapter("haiku", "b")]


async def test_models_that_are_not_served_here_keep_their_adapters_to_themselves(names: AdapterNames) -> None:
    await names.put(adapter("haiku", "a"), ["a"])
    await names.put(adapter("haiku", "b"), ["b"])
    assert await names.find("haiku", ["b"]) == adapter("haiku", "b")
    assert await names.all(["c"]) == []
    await names.remove("haiku", ["b"])
    assert await names.find("haiku", ["a"]) == adapter("haiku", "a")


async def test_names_are_bounded_in_number(names: AdapterNames) -> None:
    for number in range(1024):
        await names.put(adapter(f"{number:04}"), ["a"])
    with pytest.raises(BadRequestError, match="1024"):
        await names.put(adapter("haiku"), ["a"])
    await names.put(adapter("0000", sha256="2"), ["a"])
    await names.put(adapter("haiku", "b"), ["b"])
    listed = await names.all(["a"])
    assert len(listed) == 1024
    assert listed[0].lora.sha256 == "2"
    assert [each.name for each in listed] == sorted(each.name for each in listed)


async def test_a_file_is_everybodys_and_outlives_them(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    async with in_file(path) as mine, in_file(path) as yours:
        await mine.put(adapter("haiku"), ["a"])
        assert await yours.find("haiku", ["a"]) == adapter("haiku")
        await yours.put(adapter("sonnet"), ["a"])
        await yours.remove("haiku", ["a"])
        assert await mine.find("haiku", ["a"]) is None
    async with in_file(path) as later:
        assert await later.all(["a"]) == [adapter("sonnet")]
