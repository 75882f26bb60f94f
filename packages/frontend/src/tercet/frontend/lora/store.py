"""Stores of adapters loaded at run time: in the database that frontends share, or in memory."""

import sqlite3
from collections.abc import Sequence
from typing import Protocol

import msgspec
import orjson

from tercet.frontend.config.validation import MOST_ADAPTERS
from tercet.frontend.database import Database
from tercet.frontend.errors import BadRequestError
from tercet.protocol.messages.values import LoRAAdapter


class Adapter(msgspec.Struct, frozen=True):
    """Named adapter of a base model."""

    name: str
    base: str
    lora: LoRAAdapter
    created: int
    """Seconds since 1970."""


class AdapterNames(Protocol):
    """Store of adapters by name. `bases` are the models served here; a name is unique among their adapters."""

    async def find(self, name: str, bases: Sequence[str]) -> Adapter | None:
        """Return the adapter of that name of the first base that has one."""
        ...

    async def all(self, bases: Sequence[str]) -> list[Adapter]:
        """Return all adapters, sorted by name."""
        ...

    async def put(self, adapter: Adapter, bases: Sequence[str]) -> None:
        """Store an adapter, replacing one of that name among `bases`. Raises BadRequestError if the store is full."""
        ...

    async def remove(self, name: str, bases: Sequence[str]) -> Adapter | None:
        """Remove and return the adapter of that name."""
        ...


class AdaptersInMemory:
    """Store in the memory of this process."""

    def __init__(self) -> None:
        self._adapters: dict[tuple[str, str], Adapter] = {}

    async def find(self, name: str, bases: Sequence[str]) -> Adapter | None:
        return next((self._adapters[base, name] for base in bases if (base, name) in self._adapters), None)

    async def all(self, bases: Sequence[str]) -> list[Adapter]:
        return [self._adapters[key] for key in sorted(self._adapters, key=lambda key: key[1]) if key[0] in bases]

    async def put(self, adapter: Adapter, bases: Sequence[str]) -> None:
        others = {key: each for key, each in self._adapters.items() if key[1] != adapter.name or key[0] not in bases}
        _check_room(sum(base == adapter.base for base, _ in others))
        self._adapters = {**others, (adapter.base, adapter.name): adapter}

    async def remove(self, name: str, bases: Sequence[str]) -> Adapter | None:
        found = await self.find(name, bases)
        return None if found is None else self._adapters.pop((found.base, name))


class AdaptersInFile:
    """Store in the database, shared by all frontends of this machine and persistent."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def find(self, name: str, bases: Sequence[str]) -> Adapter | None:
        return await self._database.read(lambda connection: _find(connection, name, bases))

    async def all(self, bases: Sequence[str]) -> list[Adapter]:
        query = f"SELECT {_COLUMNS} FROM adapters WHERE base IN (SELECT value FROM json_each(?)) ORDER BY name"  # noqa: S608
        rows = await self._database.read(lambda each: each.execute(query, (orjson.dumps(bases),)).fetchall())
        return list(map(_adapter, rows))

    async def put(self, adapter: Adapter, bases: Sequence[str]) -> None:
        """Replace the adapter in a single transaction, so that readers never miss the name."""

        def work(connection: sqlite3.Connection) -> None:
            query = "DELETE FROM adapters WHERE name = ? AND base IN (SELECT value FROM json_each(?))"
            connection.execute(query, (adapter.name, orjson.dumps(bases)))
            query = "SELECT count(*) FROM adapters WHERE base = ?"
            _check_room(connection.execute(query, (adapter.base,)).fetchone()[0])
            row = (adapter.base, adapter.name, adapter.lora.path, adapter.lora.sha256, adapter.created)
            connection.execute("INSERT INTO adapters VALUES (?, ?, ?, ?, ?)", row)

        await self._database.run(work)

    async def remove(self, name: str, bases: Sequence[str]) -> Adapter | None:
        def work(connection: sqlite3.Connection) -> Adapter | None:
            found = _find(connection, name, bases)
            if found is not None:
                connection.execute("DELETE FROM adapters WHERE base = ? AND name = ?", (found.base, name))
            return found

        return await self._database.run(work)


_COLUMNS = "base, name, path, sha256, created"


def _find(connection: sqlite3.Connection, name: str, bases: Sequence[str]) -> Adapter | None:
    query = f"SELECT {_COLUMNS} FROM adapters WHERE base = ? AND name = ?"  # noqa: S608
    rows = (connection.execute(query, (base, name)).fetchone() for base in bases)
    return next((_adapter(row) for row in rows if row), None)


def _adapter(row: tuple[str, str, str, str, int]) -> Adapter:
    base, name, path, sha256, created = row
    return Adapter(name, base, LoRAAdapter(path, sha256), created)


def _check_room(others: int) -> None:
    if others >= MOST_ADAPTERS:
        raise BadRequestError(f"A model has at most {MOST_ADAPTERS} adapters.", param="lora_name")
