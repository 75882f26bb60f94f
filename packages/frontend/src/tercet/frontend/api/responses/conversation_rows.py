"""Rows of conversations: functions that run inside a transaction.

Each item has a place, and places are never reused, so the items before a place never change except by deletion.
"""

import sqlite3
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from tercet.frontend.json_number import dump_json, parse_json

Item = dict[str, Any]

_USE_SECONDS = 3600.0
"""Resolution of the time of last use, in seconds, so that not every read has to write."""
_LONG_BYTES = 65_536
_REST_RATIO = 2.0
"""Seconds of rest for each second of parsing a long item."""
_ADD = "INSERT INTO conversation_items VALUES (?, ?, ?, ?) ON CONFLICT (conversation, id) DO NOTHING"


class ConversationRow(msgspec.Struct, frozen=True):
    """A conversation without its items: `next` is the place of the next item, `size` the bytes of all items."""

    id: str
    created: int
    metadata: bytes
    next: int
    size: int


def find(
    connection: sqlite3.Connection, owner: str, conversation: str, since: float, now: float
) -> ConversationRow | None:
    """Return a conversation of the owner that was used after `since`, and record this use."""
    query = "SELECT id, created, metadata, next, bytes FROM conversations WHERE id = ? AND owner = ? AND used >= ?"
    row = connection.execute(query, (conversation, owner, since)).fetchone()
    if row is None:
        return None
    query = "UPDATE conversations SET used = ? WHERE id = ? AND used NOT BETWEEN ? AND ?"
    connection.execute(query, (now, conversation, now - _USE_SECONDS, now))
    return ConversationRow(*row)


def append(connection: sqlite3.Connection, conversation: str, items: Sequence[Item], now: float) -> None:
    """Append the items that are not in the conversation yet, in order. A deleted conversation is not created again."""
    row = connection.execute("SELECT next FROM conversations WHERE id = ?", (conversation,)).fetchone()
    if row is None:
        return
    added = 0
    for place, item in enumerate(items, row[0]):
        data = dump_json(item)
        added += len(data) * connection.execute(_ADD, (conversation, place, item["id"], data)).rowcount
    query = "UPDATE conversations SET next = next + ?, bytes = bytes + ?, used = ? WHERE id = ?"
    connection.execute(query, (len(items), added, now, conversation))


def items_before(connection: sqlite3.Connection, conversation: str, place: int) -> list[Item]:
    """Return the items before a place."""
    query = "SELECT data FROM conversation_items WHERE conversation = ? AND place < ? ORDER BY place"
    return [parse_item(data) for (data,) in connection.execute(query, (conversation, place))]


def parse_item(data: bytes) -> Item:
    """Return a stored item. A long one is followed by a rest of this thread, because parsing holds the GIL."""
    started = time.perf_counter()
    item: Item = parse_json(data)
    if len(data) > _LONG_BYTES:
        time.sleep(_REST_RATIO * (time.perf_counter() - started))
    return item


def item_of_any(connection: sqlite3.Connection, owner: str, item: str, since: float) -> Item | None:
    """Return an item of any conversation of the owner."""
    query = (
        "SELECT data FROM conversation_items JOIN conversations ON conversations.id = conversation"
        " WHERE conversation_items.id = ? AND owner = ? AND used >= ? ORDER BY used DESC LIMIT 1"
    )
    row = connection.execute(query, (item, owner, since)).fetchone()
    return parse_item(row[0]) if row else None
