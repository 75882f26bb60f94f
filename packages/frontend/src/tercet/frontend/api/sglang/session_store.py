"""SQLite store of sessions and their turns: the token ids of each prompt and output, for later turns to continue.

Keys and values of these tokens are not stored here: the schedulers' prefix caches recognize the prefix.
"""

import secrets
import sqlite3
import time
from collections.abc import Callable

import msgspec

from tercet.frontend.database import Database
from tercet.frontend.errors import BadRequestError, NotFoundError
from tercet.protocol.messages.values import pack_ints, unpack_ints

_MAX_TURNS = 4096
_DESCENDANTS = """
DELETE FROM turns WHERE owner = :owner AND session = :session AND rid IN (
    WITH RECURSIVE gone (rid) AS (
        SELECT rid FROM turns WHERE owner = :owner AND session = :session AND parent IS :parent
        UNION ALL
        SELECT turns.rid FROM turns JOIN gone ON turns.parent = gone.rid
        WHERE turns.owner = :owner AND turns.session = :session
    )
    SELECT rid FROM gone
)"""


class Turn(msgspec.Struct, frozen=True):
    """A finished request of a session; `parent` is the turn that it continued."""

    rid: str
    parent: str | None
    prompt_ids: list[int]
    output_ids: list[int]
    tokenizer: str | None = None
    """SHA-256 of the tokenizer.json that the ids belong to; None for turns stored by version 0.1.0."""


class SessionStore:
    """The sessions of all frontends. A session is visible to its owner only."""

    def __init__(self, database: Database, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._clock = clock

    async def open(self, owner: str, capacity: int, session: str | None) -> str:
        """Open a session whose prompts have at most `capacity` tokens. Raises BadRequestError for a duplicate id."""
        chosen = session or secrets.token_hex(16)

        def work(connection: sqlite3.Connection) -> None:
            now = self._clock()
            self._database.prune(connection, now)
            query = "INSERT INTO sessions VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
            if not connection.execute(query, (owner, chosen, now, capacity)).rowcount:
                raise BadRequestError(f"The session '{chosen}' is open already.", param="session_id")

        await self._database.run(work)
        return chosen

    async def close(self, owner: str, session: str) -> None:
        """Delete a session and its turns. Raises NotFoundError."""
        since = self._since

        def work(connection: sqlite3.Connection) -> None:
            _capacity(connection, owner, session, since, param="session_id")
            connection.execute("DELETE FROM sessions WHERE owner = ? AND id = ?", (owner, session))

        await self._database.run(work)

    async def turn(self, owner: str, session: str, rid: str | None) -> tuple[int, Turn | None]:
        """Return the capacity of a session, and one of its turns. Raises NotFoundError or BadRequestError."""
        since = self._since

        def work(connection: sqlite3.Connection) -> tuple[int, Turn | None]:
            capacity = _capacity(connection, owner, session, since)
            query = "SELECT count(*) FROM turns WHERE owner = ? AND session = ?"
            if connection.execute(query, (owner, session)).fetchone()[0] >= _MAX_TURNS:
                raise BadRequestError(f"A session has at most {_MAX_TURNS} turns.", param="session_params.id")
            if rid is None:
                return capacity, None
            query = (
                "SELECT parent, prompt_ids, output_ids, tokenizer FROM turns"
                " LEFT JOIN turn_tokenizers USING (owner, session, rid) WHERE owner = ? AND session = ? AND rid = ?"
            )
            row = connection.execute(query, (owner, session, rid)).fetchone()
            if row is None:
                raise BadRequestError(f"The session has no finished request '{rid}'.", param="session_params.rid")
            return capacity, Turn(rid, row[0], list(unpack_ints(row[1])), list(unpack_ints(row[2])), row[3])

        return await self._database.read(work)

    async def add(self, owner: str, session: str, turn: Turn, *, replace: bool = False) -> None:
        """Store a finished turn. With `replace`, delete the earlier continuations of its parent.

        A session that has been closed meanwhile is not opened again.
        """

        def work(connection: sqlite3.Connection) -> None:
            query = "SELECT 1 FROM sessions WHERE owner = ? AND id = ?"
            if not connection.execute(query, (owner, session)).fetchone():
                return
            if replace:
                names = {"owner": owner, "session": session, "parent": turn.parent}
                connection.execute(_DESCENDANTS, names)
            row = (owner, session, turn.rid, turn.parent, pack_ints(turn.prompt_ids), pack_ints(turn.output_ids))
            connection.execute("INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?)", row)
            if turn.tokenizer is not None:
                of_what = (owner, session, turn.rid, turn.tokenizer)
                connection.execute("INSERT INTO turn_tokenizers VALUES (?, ?, ?, ?)", of_what)
            self._database.prune(connection, self._clock())

        await self._database.run(work)

    @property
    def _since(self) -> float:
        """Return the time before which sessions have expired."""
        return self._database.oldest(self._clock())


def _capacity(
    connection: sqlite3.Connection, owner: str, session: str, since: float, param: str = "session_params.id"
) -> int:
    query = "SELECT capacity FROM sessions WHERE owner = ? AND id = ? AND created >= ?"
    row = connection.execute(query, (owner, session, since)).fetchone()
    if row is None:
        raise NotFoundError(f"There is no session '{session}'.", param=param)
    capacity: int = row[0]
    return capacity
