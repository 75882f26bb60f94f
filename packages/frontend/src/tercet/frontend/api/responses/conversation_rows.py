"""The rows of conversations, as parts of a transaction.

Each item has a place, and a place is never given twice: what stood before one is known for ever.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec
import orjson

Item = dict[str, Any]

_USE_SECONDS = 3600.0
"""How exactly it is known when a conversation was last used: not every reader has to write."""
_ADD = "INSERT INTO conversation_items VALUES (?, ?, ?, ?) ON CONFLICT (conversation, id) DO NOTHING"


class ConversationRow(msgspec.Struct, frozen=True):
    """A conversation without its items: `next` is the place of the next one, `size` the bytes of all."""

    id: str
    created: int
    metadata: bytes
    next: int
    size: int


def find(
    connection: sqlite3.Connection, owner: str, conversation: str, since: float, now: float
) -> ConversationRow | None:
    """A conversation of the owner's that was used after `since`. This, too, is a use."""
    query = "SELECT id, created, metadata, next, bytes FROM conversations WHERE id = ? AND owner = ? AND used >= ?"
    row = connection.execute(query, (conversation, owner, since)).fetchone()
    if row is None:
        return None
    query = "UPDATE conversations SET used = ? WHERE id = ? AND used NOT BETWEEN ? AND ?"
    connection.execute(query, (now, conversation, now - _USE_SECONDS, now))
    return ConversationRow(*row)


def append(connection: sqlite3.Connection, conversation: str, items: Sequence[Item], now: float) -> None:
    """Add what is not in it yet, all in order. One that was deleted in the meantime is not made again."""
    row = connection.execute("SELECT next FROM conversations WHERE id = ?", (conversation,)).fetchone()
    if row is None:
        return
    added = 0
    for place, item in enumerate(items, row[0]):
        data = orjson.dumps(item)
        added += len(data) * connection.execute(_ADD, (conversation, place, item["id"], data)).rowcount
    query = "UPDATE conversations SET next = next + ?, bytes = bytes + ?, used = ? WHERE id = ?"
    connection.execute(query, (len(items), added, now, conversation))


def items_before(connection: sqlite3.Connection, conversation: str, place: int) -> list[Item]:
    """Those of its items that stand before a place."""
    query = "SELECT data FROM conversation_items WHERE conversation = ? AND place < ? ORDER BY place"
    return [orjson.loads(data) for (data,) in connection.execute(query, (conversation, place))]


def item_of_any(connection: sqlite3.Connection, owner: str, item: str, since: float) -> Item | None:
    """An item of whichever of the owner's conversations."""
    query = (
        "SELECT data FROM conversation_items JOIN conversations ON conversations.id = conversation"
        " WHERE conversation_items.id = ? AND owner = ? AND used >= ? ORDER BY used DESC LIMIT 1"
    )
    row = connection.execute(query, (item, owner, since)).fetchone()
    return orjson.loads(row[0]) if row else None
