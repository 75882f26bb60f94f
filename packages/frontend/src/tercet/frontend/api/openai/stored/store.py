"""SQLite store of chat completions and their messages. A completion is visible to its owner only."""

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from tercet.frontend.database import Database
from tercet.frontend.errors import NotFoundError
from tercet.frontend.http.list_page import PageQuery, listed, unknown_after
from tercet.frontend.json_number import dump_json

MAX_PAGE_BYTES = 32 * 1024 * 1024
"""Bytes after which a page ends, even if its limit is not reached. A page has at least one entry."""
_PAGE = """
SELECT id, body, metadata FROM chat_completions
WHERE owner = :owner AND stored >= :since AND (:model IS NULL OR model = :model) AND {filters}
AND (created, row) {beyond} (:created, :row) ORDER BY created {order}, row {order} LIMIT :limit
"""
_HAS_PAIR = (
    "EXISTS (SELECT 1 FROM chat_completion_metadata AS pair"
    " WHERE pair.completion = chat_completions.row AND key = :key{n} AND value = :value{n})"
)
_MESSAGES = """
SELECT place, data FROM chat_completion_messages
WHERE completion = ? AND place {beyond} ? ORDER BY place {order} LIMIT ?
"""
_BEYOND = {"asc": ">", "desc": "<"}
_KIND = "Chat completion"
_START = {"asc": -1, "desc": 2**62}
Page = dict[str, Any]
"""The list object of the API."""


class StoredChat(msgspec.Struct, frozen=True, kw_only=True):
    """Finished completion: `body` is its JSON object without metadata, each message a JSON object without an id."""

    id: str
    created: int
    model: str
    metadata: Mapping[str, str]
    body: bytes
    messages: Sequence[bytes]


class ChatFilter(msgspec.Struct, frozen=True):
    """Properties that listed completions have: the model, and entries of the metadata."""

    model: str | None = None
    metadata: Mapping[str, str] = {}


class StoredChats:
    """The stored completions of all frontends. `clock` returns seconds since 1970, and must agree between frontends."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def save(self, owner: str, chat: StoredChat) -> None:
        """Store a completion and its messages."""

        def work(connection: sqlite3.Connection) -> None:
            now = self._clock()
            self._database.prune(connection, now)
            values = (chat.id, owner, now, chat.created, chat.model, dump_json(chat.metadata), chat.body)
            row = connection.execute(
                "INSERT INTO chat_completions VALUES (NULL, ?, ?, ?, ?, ?, ?, ?)", values
            ).lastrowid
            assert row is not None
            _add_pairs(connection, row, chat.metadata)
            placed = [(row, place, data) for place, data in enumerate(chat.messages)]
            connection.executemany("INSERT INTO chat_completion_messages VALUES (?, ?, ?)", placed)

        await self._database.run(work)

    async def get(self, owner: str, completion: str) -> bytes:
        """Return the JSON of a completion. Raises NotFoundError."""
        since = self._since
        return await self._database.read(
            lambda each: _to_json(*_find(each, "body, metadata", owner, completion, since))
        )

    async def update(self, owner: str, completion: str, metadata: Mapping[str, str]) -> bytes:
        """Replace the metadata of a completion, and return its JSON. Raises NotFoundError."""
        since = self._since

        def work(connection: sqlite3.Connection) -> bytes:
            row, body = _find(connection, "row, body", owner, completion, since)
            data = dump_json(metadata)
            connection.execute("UPDATE chat_completions SET metadata = ? WHERE row = ?", (data, row))
            connection.execute("DELETE FROM chat_completion_metadata WHERE completion = ?", (row,))
            _add_pairs(connection, row, metadata)
            return _to_json(body, data)

        return await self._database.run(work)

    async def delete(self, owner: str, completion: str) -> None:
        """Delete a completion and its messages. Raises NotFoundError."""
        since = self._since

        def work(connection: sqlite3.Connection) -> None:
            (row,) = _find(connection, "row", owner, completion, since)
            connection.execute("DELETE FROM chat_completions WHERE row = ?", (row,))

        await self._database.run(work)

    async def page(self, owner: str, wanted: ChatFilter, query: PageQuery) -> Page:
        """Return a page of the owner's completions, by the time they began. Raises BadRequestError."""
        since = self._since
        pairs = [_HAS_PAIR.format(n=n) for n in range(len(wanted.metadata))]
        sql = _PAGE.format(filters=" AND ".join(pairs) or "TRUE", **_direction(query))
        values = {"owner": owner, "since": since, "model": wanted.model, "limit": query.limit + 1}
        for n, (key, value) in enumerate(wanted.metadata.items()):
            values |= {f"key{n}": key, f"value{n}": value}

        def work(connection: sqlite3.Connection) -> Page:
            row = created = _START[query.order]
            if query.after is not None:
                try:
                    row, created = _find(connection, "row, created", owner, query.after, since)
                except NotFoundError:
                    raise unknown_after(_KIND, query.after) from None
            found = connection.execute(sql, {**values, "created": created, "row": row})
            return _page(((name, _to_json(body, metadata)) for name, body, metadata in found), query.limit)

        return await self._database.read(work)

    async def messages(self, owner: str, completion: str, query: PageQuery) -> Page:
        """Return a page of the messages of a completion. Raises NotFoundError or BadRequestError."""
        since = self._since
        sql = _MESSAGES.format(**_direction(query))

        def work(connection: sqlite3.Connection) -> Page:
            (row,) = _find(connection, "row", owner, completion, since)
            begin = _START[query.order]
            if query.after is not None:
                begin = _message_place(connection, row, completion, query.after)
            found = connection.execute(sql, (row, begin, query.limit + 1))
            return _page((_named_message(completion, place, data) for place, data in found), query.limit)

        return await self._database.read(work)

    @property
    def _since(self) -> float:
        """Return the time before which completions have expired."""
        return self._database.oldest(self._clock())


def _direction(query: PageQuery) -> dict[str, str]:
    return {"beyond": _BEYOND[query.order], "order": query.order.upper()}


def _find(connection: sqlite3.Connection, columns: str, owner: str, completion: str, since: float) -> tuple[Any, ...]:
    """Return these columns of a completion. Raises NotFoundError."""
    query = f"SELECT {columns} FROM chat_completions WHERE id = ? AND owner = ? AND stored >= ?"  # noqa: S608
    found: tuple[Any, ...] | None = connection.execute(query, (completion, owner, since)).fetchone()
    if found is None:
        raise NotFoundError(f"{_KIND} with id '{completion}' not found.", param="completion_id")
    return found


def _message_place(connection: sqlite3.Connection, row: int, completion: str, message: str) -> int:
    """Return the place of a message by its id. Raises BadRequestError."""
    number = message.removeprefix(f"{completion}-")
    if number.isascii() and number.isdecimal() and len(number) <= 10 and f"{completion}-{int(number)}" == message:
        query = "SELECT place FROM chat_completion_messages WHERE completion = ? AND place = ?"
        if connection.execute(query, (row, int(number))).fetchone():
            return int(number)
    raise unknown_after("Message", message)


def _add_pairs(connection: sqlite3.Connection, row: int, metadata: Mapping[str, str]) -> None:
    pairs = [(row, key, value) for key, value in metadata.items()]
    connection.executemany("INSERT INTO chat_completion_metadata VALUES (?, ?, ?)", pairs)


def _to_json(body: bytes, metadata: bytes) -> bytes:
    return body[:-1] + b',"metadata":' + metadata + b"}"


def _named_message(completion: str, place: int, data: bytes) -> tuple[str, bytes]:
    name = f"{completion}-{place}"
    return name, b'{"id":' + dump_json(name) + b"," + data[1:]


def _page(found: Iterator[tuple[str, bytes]], limit: int) -> Page:
    """Return the page of the first entries, without parsing them."""
    entries: list[tuple[str, orjson.Fragment]] = []
    size, has_more = 0, False
    for name, entry in found:
        has_more = len(entries) == limit or size > MAX_PAGE_BYTES
        if has_more:
            break
        entries.append((name, orjson.Fragment(entry)))
        size += len(entry)
    return listed(entries, has_more=has_more)
