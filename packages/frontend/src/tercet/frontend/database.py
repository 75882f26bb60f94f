"""SQLite database of everything that outlives a process, shared by several frontends."""

import asyncio
import contextlib
import logging
import os
import re
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from tercet.frontend.config.config import StoreConfig
from tercet.frontend.http.auth import current_caller
from tercet.frontend.round_robin import RoundRobinQueue
from tercet.protocol.system.private_files import make_private_directory, open_private, state_directory

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_FORMAT = 1
"""`PRAGMA user_version` of the tables below. A file with another number is left alone. Tables are only ever added,
not changed: frontends of other versions may share the file."""
_BUSY_SECONDS = 5.0
"""Seconds that a transaction waits for those of other processes."""
_TURN_SECONDS = 5.0
"""Seconds that a transaction waits for those of the same process."""
_WAL_BYTES = 16 * 1024 * 1024
_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    model TEXT NOT NULL,
    status TEXT NOT NULL,
    background INTEGER NOT NULL,
    previous TEXT,
    request BLOB NOT NULL,
    body BLOB NOT NULL,
    frontend TEXT NOT NULL,
    lease REAL NOT NULL,
    runs INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created);
CREATE INDEX IF NOT EXISTS responses_running ON responses (lease) WHERE status IN ('queued', 'in_progress');
CREATE TABLE IF NOT EXISTS items (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    place INTEGER NOT NULL,
    id TEXT NOT NULL,
    given INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (response, place)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_id ON items (id);
CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (response, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    created REAL NOT NULL,
    capacity INTEGER NOT NULL,
    PRIMARY KEY (owner, id)
) STRICT;
CREATE INDEX IF NOT EXISTS sessions_by_age ON sessions (created);
CREATE TABLE IF NOT EXISTS turns (
    owner TEXT NOT NULL,
    session TEXT NOT NULL,
    rid TEXT NOT NULL,
    parent TEXT,
    prompt_ids BLOB NOT NULL,
    output_ids BLOB NOT NULL,
    PRIMARY KEY (owner, session, rid),
    FOREIGN KEY (owner, session) REFERENCES sessions (owner, id) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turns_by_parent ON turns (owner, session, parent);
CREATE TABLE IF NOT EXISTS turn_tokenizers (
    owner TEXT NOT NULL,
    session TEXT NOT NULL,
    rid TEXT NOT NULL,
    tokenizer TEXT NOT NULL,
    PRIMARY KEY (owner, session, rid),
    FOREIGN KEY (owner, session, rid) REFERENCES turns (owner, session, rid) ON DELETE CASCADE
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created INTEGER NOT NULL,
    used REAL NOT NULL,
    metadata BLOB NOT NULL,
    next INTEGER NOT NULL,
    bytes INTEGER NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (used);
CREATE TABLE IF NOT EXISTS conversation_items (
    conversation TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
    place INTEGER NOT NULL,
    id TEXT NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (conversation, place),
    UNIQUE (conversation, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversation_items_by_id ON conversation_items (id);
CREATE TABLE IF NOT EXISTS response_conversations (
    response TEXT PRIMARY KEY REFERENCES responses ON DELETE CASCADE,
    conversation TEXT NOT NULL,
    seen INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chat_completions (
    row INTEGER PRIMARY KEY,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    stored REAL NOT NULL,
    created INTEGER NOT NULL,
    model TEXT NOT NULL,
    metadata BLOB NOT NULL,
    body BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS chat_completions_by_age ON chat_completions (stored);
CREATE INDEX IF NOT EXISTS chat_completions_by_owner ON chat_completions (owner, created, row, model, stored);
CREATE TABLE IF NOT EXISTS chat_completion_metadata (
    completion INTEGER NOT NULL REFERENCES chat_completions ON DELETE CASCADE,
    key TEXT NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (completion, key)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS chat_completion_messages (
    completion INTEGER NOT NULL REFERENCES chat_completions ON DELETE CASCADE,
    place INTEGER NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (completion, place)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS adapters (
    base TEXT NOT NULL,
    name TEXT NOT NULL,
    path TEXT NOT NULL,
    sha256 TEXT NOT NULL,
    created INTEGER NOT NULL,
    PRIMARY KEY (base, name)
) STRICT, WITHOUT ROWID;
"""

_LARGEST_OWNER = """
SELECT owner FROM (
    SELECT owner, length(request) + length(body) AS bytes FROM responses
    UNION ALL SELECT owner, length(data) FROM items JOIN responses ON items.response = responses.id
    UNION ALL SELECT owner, length(data) FROM events JOIN responses ON events.response = responses.id
    UNION ALL SELECT owner, 0 FROM sessions
    UNION ALL SELECT owner, length(prompt_ids) + length(output_ids) FROM turns
    UNION ALL SELECT owner, bytes + length(metadata) FROM conversations
    UNION ALL SELECT owner, length(metadata) + length(body) FROM chat_completions
    UNION ALL SELECT owner, length(data) FROM chat_completion_messages
        JOIN chat_completions ON completion = chat_completions.row
) GROUP BY owner ORDER BY sum(bytes) DESC LIMIT 1
"""
_AGES = {"responses": "created", "sessions": "created", "conversations": "used", "chat_completions": "stored"}
"""Tables that are pruned, and the column with the time of creation or last use."""
_OF_OWNER = " UNION ALL ".join(
    f"SELECT '{table}' AS kind, rowid AS row, {age} AS at FROM {table} WHERE owner = ?1"  # noqa: S608
    for table, age in _AGES.items()
)
_OLDEST_OF_OWNER = (
    f"SELECT kind, row FROM ({_OF_OWNER}) ORDER BY at LIMIT (SELECT 1 + count(*) / 16 FROM ({_OF_OWNER}))"  # noqa: S608
)
"""One sixteenth of an owner's rows: a compromise between keeping rows and the number of pruning passes."""


class StoreError(OSError):
    """Read or write failure, such as a full or missing disk. The text is one line, fit for clients."""


class _Worker:
    """Connection with a thread of its own. API keys take turns, and every wait has a timeout."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting = RoundRobinQueue()
        self._busy = False

    async def run(self, begin: str, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run `work` as one transaction and return its result; an error rolls it back. Raises StoreError."""
        if self._busy:
            await self._wait(current_caller().owner)
        self._busy = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, begin, work)
        finally:
            self._next()

    def close(self) -> None:
        """Finish the running transaction and close the connection."""
        self._thread.shutdown()
        self._connection.close()

    async def _wait(self, owner: str) -> None:
        turn = self._waiting.join(owner)
        try:
            await asyncio.wait({turn}, timeout=_TURN_SECONDS)
        except asyncio.CancelledError:
            if turn.done():
                self._next()  # the turn was granted but is not used
            turn.cancel()
            raise
        if not turn.done():
            turn.cancel()
            raise StoreError(f"The store of responses is busy: no turn within {_TURN_SECONDS:g} seconds. Try again.")

    def _next(self) -> None:
        self._busy = self._waiting.next()

    def _transact(self, begin: str, work: Callable[[sqlite3.Connection], _T]) -> _T:
        connection = self._connection
        try:
            connection.execute(begin)
            result = work(connection)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise StoreError(f"The store of responses does not answer: {error}.") from error
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        return result


class Database:
    """Database file with one thread for writing and one for reading; readers never wait for writers.

    Raises OSError, and ValueError for a file in another format.
    """

    def __init__(self, path: Path, max_bytes: int, max_age: float) -> None:
        self._max_bytes = max_bytes
        self._max_age = max_age
        try:
            make_private_directory(path.parent)
            os.close(open_private(path, os.O_RDWR))  # other users must not read clients' data
            with contextlib.ExitStack() as opened:
                writing = opened.enter_context(contextlib.closing(_connection(path)))
                _prepare(writing, path)
                reading = opened.enter_context(contextlib.closing(_connection(path)))
                reading.execute("PRAGMA query_only = ON")
                opened.pop_all()
        except sqlite3.Error as error:
            raise OSError(f"{path}: {error}") from error
        self._writing = _Worker(writing, "database-writer")
        self._reading = _Worker(reading, "database-reader")

    @classmethod
    def open(cls, config: StoreConfig) -> "Database | None":
        """Open the file from the options; None if storing is disabled. Raises OSError, ValueError."""
        if config.response_store == "none":
            return None
        chosen = config.response_store == "auto"
        try:
            path = state_directory() / "responses.sqlite" if chosen else Path(config.response_store)
            return cls(path, config.response_store_bytes, config.response_store_days * 86400)
        except (OSError, ValueError) as error:
            if not chosen:
                kind = OSError if isinstance(error, OSError) else ValueError
                raise kind(f"--response-store: {error}") from error
            logger.warning("no response is stored: %s; --response-store FILE names another file", error)
            return None

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a write transaction, exclusive among all processes; an error rolls it back. Raises StoreError."""
        return await self._writing.run("BEGIN IMMEDIATE", work)

    async def read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run a read transaction on a consistent snapshot."""
        return await self._reading.run("BEGIN", work)

    async def close(self) -> None:
        """Finish running transactions and close the file."""
        for line in (self._reading, self._writing):
            await asyncio.to_thread(line.close)

    def oldest(self, now: float) -> float:
        """Return the time before which rows count as expired, even if they are still in the file."""
        return now - self._max_age

    def prune(self, connection: sqlite3.Connection, now: float) -> None:
        """Delete expired rows; then, until the rest fits, the oldest rows of the owner with the most bytes.

        Runs within a transaction. Owners that store little lose nothing to those that store much.
        """
        oldest = self.oldest(now)
        for table, age in _AGES.items():
            connection.execute(f"DELETE FROM {table} WHERE {age} < ?", (oldest,))  # noqa: S608
        while self._used(connection) > self._max_bytes:
            largest = connection.execute(_LARGEST_OWNER).fetchone()
            if largest is None:
                return
            for table, row in connection.execute(_OLDEST_OF_OWNER, largest).fetchall():
                connection.execute(f"DELETE FROM {table} WHERE rowid = ?", (row,))  # noqa: S608

    def _used(self, connection: sqlite3.Connection) -> int:
        pages, free, size = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        used: int = (pages - free) * size
        return used


def _connection(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Configure a connection and create the tables. Raises ValueError for a file of another format."""
    _check_format(connection, path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.executescript(_TABLES)
    connection.execute(f"PRAGMA user_version = {_FORMAT}")


def _check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise ValueError for a file of another version or program, before it is changed."""
    found = connection.execute("PRAGMA user_version").fetchone()[0]
    if found not in (0, _FORMAT):
        raise ValueError(f"{path} has format {found}, and this version reads format {_FORMAT}")
    ours = set(re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", _TABLES))
    there = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")
    other = next((name for (name,) in there if name not in ours and not name.startswith("sqlite_")), None)
    if found == 0 and other is not None:
        raise ValueError(f"{path} is another program's database: it has a table {other!r}")
