"""SQLite store of conversations and their items. A conversation is visible to its owner only."""

import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import orjson

from tercet.frontend.api.responses import conversation_rows as rows
from tercet.frontend.api.responses.conversation_rows import ConversationRow, Item
from tercet.frontend.api.responses.store import MAX_HISTORY_BYTES
from tercet.frontend.database import Database
from tercet.frontend.errors import BadRequestError, NotFoundError
from tercet.frontend.http.list_page import PageQuery, listed, unknown_after
from tercet.frontend.json_number import dump_json, parse_json

_PAGE = {
    "asc": "SELECT id, data FROM conversation_items WHERE conversation = ? AND place > ? ORDER BY place LIMIT ?",
    "desc": "SELECT id, data FROM conversation_items WHERE conversation = ? AND place < ? ORDER BY place DESC LIMIT ?",
}
Conversation = dict[str, Any]
"""The conversation object of the API."""


class ConversationSnapshot(msgspec.Struct, frozen=True):
    """A conversation as a response finds it at its start: the items before the place `end`, and their size in bytes."""

    items: list[Item]
    end: int
    size: int

    def check_room(self, given: Sequence[Item]) -> None:
        """Raise BadRequestError if the conversation has no room for the input."""
        _check_room(self.size + _size(given), "input")


class ConversationStore:
    """The conversations of all frontends. `clock` returns seconds since 1970, and must agree between frontends."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def create(self, owner: str, items: Sequence[Item], metadata: Mapping[str, str]) -> Conversation:
        """Create a conversation. Raises BadRequestError for items that cannot be stored."""
        conversation = f"conv_{secrets.token_hex(24)}"

        def work(connection: sqlite3.Connection) -> Conversation:
            now = self._clock()
            self._database.prune(connection, now)
            row = (conversation, owner, int(now), now, dump_json(metadata), 0, 0)
            connection.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            self._append(connection, owner, conversation, items)
            return _to_object(self._require(connection, owner, conversation))

        return await self._database.run(work)

    async def get(self, owner: str, conversation: str) -> Conversation:
        return await self._database.run(lambda each: _to_object(self._require(each, owner, conversation)))

    async def update(self, owner: str, conversation: str, metadata: Mapping[str, str]) -> Conversation:
        """Replace the metadata of a conversation. Raises NotFoundError."""

        def work(connection: sqlite3.Connection) -> Conversation:
            self._require(connection, owner, conversation)
            query = "UPDATE conversations SET metadata = ? WHERE id = ?"
            connection.execute(query, (dump_json(metadata), conversation))
            return _to_object(self._require(connection, owner, conversation))

        return await self._database.run(work)

    async def delete(self, owner: str, conversation: str) -> None:
        """Delete a conversation and its items. Raises NotFoundError."""

        def work(connection: sqlite3.Connection) -> None:
            self._require(connection, owner, conversation)
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation,))

        await self._database.run(work)

    async def add(self, owner: str, conversation: str, items: Sequence[Item]) -> None:
        """Append items. Raises NotFoundError, or BadRequestError for items that cannot be stored."""

        def work(connection: sqlite3.Connection) -> None:
            self._append(connection, owner, conversation, items)
            self._database.prune(connection, self._clock())

        await self._database.run(work)

    async def items(self, owner: str, conversation: str, query: PageQuery) -> dict[str, Any]:
        """Return a page of items, as the list object of the API. Raises NotFoundError or BadRequestError."""

        def work(connection: sqlite3.Connection) -> dict[str, Any]:
            end = self._require(connection, owner, conversation).next
            begin: int | None = end if query.order == "desc" else -1
            if query.after is not None:
                begin = _place_of(connection, conversation, query.after)
                if begin is None:
                    raise unknown_after("Item", query.after)
            found = connection.execute(_PAGE[query.order], (conversation, begin, query.limit + 1)).fetchall()
            items = [(item, orjson.Fragment(data)) for item, data in found[: query.limit]]
            return listed(items, has_more=len(found) > query.limit)

        return await self._database.run(work)

    async def item(self, owner: str, conversation: str, item: str) -> orjson.Fragment:
        """Return the JSON of an item. Raises NotFoundError."""

        def work(connection: sqlite3.Connection) -> orjson.Fragment:
            self._require(connection, owner, conversation)
            query = "SELECT data FROM conversation_items WHERE conversation = ? AND id = ?"
            row = connection.execute(query, (conversation, item)).fetchone()
            if row is None:
                raise _no_item(item)
            return orjson.Fragment(row[0])

        return await self._database.run(work)

    async def delete_item(self, owner: str, conversation: str, item: str) -> Conversation:
        """Delete an item, and return the conversation. Raises NotFoundError."""

        def work(connection: sqlite3.Connection) -> Conversation:
            self._require(connection, owner, conversation)
            query = "DELETE FROM conversation_items WHERE conversation = ? AND id = ? RETURNING length(data)"
            deleted = connection.execute(query, (conversation, item)).fetchall()
            if not deleted:
                raise _no_item(item)
            connection.execute("UPDATE conversations SET bytes = bytes - ? WHERE id = ?", (deleted[0][0], conversation))
            return _to_object(self._require(connection, owner, conversation))

        return await self._database.run(work)

    async def snapshot(self, owner: str, conversation: str) -> ConversationSnapshot:
        """Return the conversation for a response that continues it. Raises NotFoundError or BadRequestError."""

        def work(connection: sqlite3.Connection) -> ConversationSnapshot:
            found = self._require(connection, owner, conversation, "conversation")
            _check_room(found.size, "conversation")
            return ConversationSnapshot(rows.items_before(connection, conversation, found.next), found.next, found.size)

        return await self._database.run(work)

    def _require(
        self, connection: sqlite3.Connection, owner: str, conversation: str, param: str = "conversation_id"
    ) -> ConversationRow:
        now = self._clock()
        row = rows.find(connection, owner, conversation, self._database.oldest(now), now)
        if row is None:
            raise NotFoundError(f"Conversation with id '{conversation}' not found.", param=param)
        return row

    def _append(self, connection: sqlite3.Connection, owner: str, conversation: str, items: Sequence[Item]) -> None:
        """Append items.

        Raises NotFoundError, or BadRequestError for duplicate ids and for items that exceed the limit.
        """
        found = self._require(connection, owner, conversation)
        ids: set[str] = set()
        for place, item in enumerate(items):
            if item["id"] in ids or _place_of(connection, conversation, item["id"]) is not None:
                raise BadRequestError(f"There is an item '{item['id']}' already.", param=f"items[{place}].id")
            ids.add(item["id"])
        _check_room(found.size + _size(items), "items")
        rows.append(connection, conversation, items, self._clock())


def _size(items: Sequence[Item]) -> int:
    return sum(len(dump_json(item)) for item in items)


def _check_room(size: int, param: str) -> None:
    if size > MAX_HISTORY_BYTES:
        raise BadRequestError(f"A conversation holds at most {MAX_HISTORY_BYTES} bytes of items.", param=param)


def _place_of(connection: sqlite3.Connection, conversation: str, item: str) -> int | None:
    query = "SELECT place FROM conversation_items WHERE conversation = ? AND id = ?"
    row = connection.execute(query, (conversation, item)).fetchone()
    return row[0] if row else None


def _no_item(item: str) -> NotFoundError:
    return NotFoundError(f"Item with id '{item}' not found.", param="item_id")


def _to_object(row: ConversationRow) -> Conversation:
    return {
        "id": row.id,
        "object": "conversation",
        "created_at": row.created,
        "metadata": parse_json(row.metadata),
    }
