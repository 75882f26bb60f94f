"""SQLite store of responses: the input and output of each, and the lease of the frontend that generates it.

A response is visible to its owner only. A background response is leased to a frontend, which renews the lease while it
lives. `run` counts the frontends that took the lease; one that has lost it can write nothing more.
"""

import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from tercet.frontend.api.responses import conversation_rows as rows
from tercet.frontend.api.responses.event_log import items_from_events
from tercet.frontend.database import Database
from tercet.frontend.errors import ApiError, BadRequestError, NotFoundError
from tercet.frontend.json_number import dump_json, parse_json

Item = dict[str, Any]
Body = dict[str, Any]

LEASE_SECONDS = 10.0
MAX_HISTORY_BYTES = 32 * 1024 * 1024
"""Maximum bytes of history of a response, because all of it is read into memory before the prompt is built."""
MAX_EVENTS = 256
"""Maximum number of events that one read returns."""
_RUNNING = ("queued", "in_progress")
_COMPLETED = ("completed", "incomplete")
_HOLDS_LEASE = (
    "SELECT 1 FROM responses WHERE id = ? AND frontend = ? AND runs = ? AND status IN ('queued', 'in_progress')"
)
_RENEW = (
    "UPDATE responses SET lease = ? WHERE id = ? AND frontend = ? AND runs = ? AND status IN ('queued', 'in_progress')"
)
_RELEASE_LEASE = (
    "UPDATE responses SET lease = 0, runs = runs - 1"
    " WHERE id = ? AND frontend = ? AND runs = ? AND status IN ('queued', 'in_progress')"
)


class LeaseLostError(Exception):
    """Error: the response was cancelled, deleted or taken by another frontend; nothing more may be written."""


class Lease(msgspec.Struct, frozen=True):
    """The right to generate a background response."""

    id: str
    run: int


class Job(msgspec.Struct, frozen=True):
    """A background response that its frontend has left."""

    lease: Lease
    owner: str
    request: dict[str, Any]
    given: list[Item]


class ResponseStore:
    """The responses of all frontends. `clock` returns seconds since 1970, and must agree between frontends."""

    def __init__(self, database: Database, peer: str, clock: Callable[[], float] = time.time) -> None:
        self._database = database
        self._peer = peer
        self._clock = clock
        self._overdue: dict[str, float] = {}
        """Expired or invalid leases of the last check, by response."""

    async def save(self, owner: str, body: Body, given: Sequence[Item], seen: int = 0) -> None:
        """Store a finished response with its own input items.

        If it has a conversation, input and output are appended there as well; the response has seen the items before
        the place `seen`. A response with `store: false` is added to its conversation only.
        """

        def work(connection: sqlite3.Connection) -> None:
            if body["store"]:
                self._insert(connection, owner, body, given, {}, seen, lease=0.0)
            else:
                self._database.prune(connection, self._clock())
            _append_to_conversation(connection, body, given, self._clock())

        await self._database.run(work)

    async def begin(
        self, owner: str, body: Body, given: Sequence[Item], request: Mapping[str, Any], seen: int = 0
    ) -> Lease:
        """Store a new background response and return its lease. `request` holds all that is needed to resume it."""
        lease = self._clock() + LEASE_SECONDS
        await self._database.run(lambda each: self._insert(each, owner, body, given, request, seen, lease=lease))
        return Lease(body["id"], 1)

    async def get(self, owner: str, response: str) -> Body:
        """Return the response body. Raises NotFoundError."""
        since = self._since
        return await self._database.read(lambda each: _read_body(each, owner, response, since))

    async def delete(self, owner: str, response: str) -> None:
        """Delete a response, which stops its generation. Raises NotFoundError."""
        since = self._since

        def work(connection: sqlite3.Connection) -> None:
            _read_body(connection, owner, response, since)
            connection.execute("DELETE FROM responses WHERE id = ?", (response,))

        await self._database.run(work)

    async def cancel(self, owner: str, response: str) -> Body:
        """Cancel a background response, keeping its output so far. A finished one is unchanged.

        Raises ApiError.
        """
        since = self._since

        def work(connection: sqlite3.Connection) -> Body:
            body = _read_body(connection, owner, response, since)
            if not body["background"]:
                raise BadRequestError("Only a response that runs in the background can be cancelled.")
            if body["status"] in _RUNNING:
                body |= {"status": "cancelled", "output": items_from_events(_emitted(connection, response))}
                _finish(connection, response, body, self._clock())
            return body

        return await self._database.run(work)

    async def input_items(self, owner: str, response: str) -> list[Item]:
        """Return all input items, including the input and output of earlier responses. Raises NotFoundError."""
        since = self._since

        def work(connection: sqlite3.Connection) -> list[Item]:
            body = _read_body(connection, owner, response, since)
            before = body["previous_response_id"]
            earlier = _history(connection, owner, before, since, NotFoundError) if before else []
            earlier += _seen(connection, response, since, NotFoundError)
            return earlier + _given(connection, response)

        return await self._database.read(work)

    async def history(self, owner: str, response: str) -> list[Item]:
        """Return the items that a response which continues this one starts with. Raises BadRequestError."""
        since = self._since
        return await self._database.read(lambda each: _history(each, owner, response, since, BadRequestError))

    async def item(self, owner: str, item: str) -> Item | None:
        """Return an item of any response or conversation of the owner."""
        query = (
            "SELECT data FROM items JOIN responses ON responses.id = items.response"
            " WHERE items.id = ? AND owner = ? AND created >= ? ORDER BY created DESC LIMIT 1"
        )
        since = self._since

        def work(connection: sqlite3.Connection) -> Item | None:
            row = connection.execute(query, (item, owner, since)).fetchone()
            return rows.parse_item(row[0]) if row else rows.item_of_any(connection, owner, item, since)

        return await self._database.read(work)

    # Background responses.

    async def add(self, lease: Lease, first: int, events: Sequence[bytes], body: Body | None = None) -> None:
        """Add events, numbered from `first`, and update the body. Raises LeaseLostError."""

        def work(connection: sqlite3.Connection) -> None:
            self._require(connection, lease)
            numbered = [(lease.id, first + place, event) for place, event in enumerate(events)]
            connection.executemany("INSERT OR REPLACE INTO events VALUES (?, ?, ?)", numbered)
            if body is not None and body["status"] in _RUNNING:
                _update(connection, lease.id, body)
            elif body is not None:
                _finish(connection, lease.id, body, self._clock())
                self._database.prune(connection, self._clock())

        await self._database.run(work)

    async def events(self, owner: str, response: str, after: int) -> tuple[list[bytes], bool]:
        """Return at most `MAX_EVENTS` events with numbers above `after`, and whether more will come.

        Raises NotFoundError.
        """
        since = self._since

        def work(connection: sqlite3.Connection) -> tuple[list[bytes], bool]:
            query = "SELECT status FROM responses WHERE id = ? AND owner = ? AND created >= ?"
            row = connection.execute(query, (response, owner, since)).fetchone()
            if row is None:
                raise _not_found(response)
            query = "SELECT data FROM events WHERE response = ? AND number > ? ORDER BY number LIMIT ?"
            events = [data for (data,) in connection.execute(query, (response, after, MAX_EVENTS))]
            return events, row[0] in _RUNNING or len(events) == MAX_EVENTS

        return await self._database.read(work)

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Renew the leases; return the lost ones."""
        until = self._clock() + LEASE_SECONDS

        def work(connection: sqlite3.Connection) -> list[Lease]:
            return [each for each in leases if not connection.execute(_RENEW, (until, *self._lease_key(each))).rowcount]

        return await self._database.run(work)

    async def release_lease(self, lease: Lease) -> None:
        """Release a lease, so that another frontend can take it."""
        await self._database.run(lambda each: each.execute(_RELEASE_LEASE, self._lease_key(lease)))

    async def take_expired(self, models: Sequence[str]) -> list[Job]:
        """Return the background responses that dead frontends have left, for models served here. Call it periodically.

        An expired lease is taken at the second call only. By then a live frontend has renewed it, even if the machine
        was suspended or the clock was set forward or back.
        """
        now = self._clock()

        def work(connection: sqlite3.Connection) -> list[Job]:
            found = connection.execute(
                "SELECT id, owner, request, runs, lease FROM responses"
                " WHERE status IN ('queued', 'in_progress') AND lease NOT BETWEEN ? AND ?"
                " AND model IN (SELECT value FROM json_each(?))",
                (now, now + LEASE_SECONDS, dump_json(models)),
            ).fetchall()
            before, self._overdue = self._overdue, {row[0]: row[4] for row in found}
            found = [row for row in found if not row[4] or before.get(row[0]) == row[4]]
            taken = [(self._peer, now + LEASE_SECONDS, row[0]) for row in found]
            connection.executemany("UPDATE responses SET frontend = ?, lease = ?, runs = runs + 1 WHERE id = ?", taken)
            return [
                Job(Lease(response, runs + 1), owner, parse_json(request), _given(connection, response))
                for response, owner, request, runs, _ in found
            ]

        return await self._database.run(work)

    async def all_events(self, response: str) -> list[dict[str, Any]]:
        """Return all events so far."""
        return await self._database.read(lambda each: _emitted(each, response))

    @property
    def _since(self) -> float:
        """Return the time before which responses have expired."""
        return self._database.oldest(self._clock())

    def _insert(
        self,
        connection: sqlite3.Connection,
        owner: str,
        body: Body,
        given: Sequence[Item],
        request: Mapping[str, Any],
        seen: int,
        *,
        lease: float,
    ) -> None:
        now = self._clock()
        self._database.prune(connection, now)
        row = (
            *(body["id"], owner, now, body["model"], body["status"], bool(body["background"])),
            *(body["previous_response_id"], dump_json(request), dump_json(body), self._peer, lease, 1),
        )
        connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        if body.get("conversation"):
            place = (body["id"], body["conversation"]["id"], seen)
            connection.execute("INSERT INTO response_conversations VALUES (?, ?, ?)", place)
        _add_items(connection, body["id"], 0, given, given=True)
        _add_items(connection, body["id"], len(given), body["output"], given=False)

    def _lease_key(self, lease: Lease) -> tuple[str, str, int]:
        return lease.id, self._peer, lease.run

    def _require(self, connection: sqlite3.Connection, lease: Lease) -> None:
        if not connection.execute(_HOLDS_LEASE, self._lease_key(lease)).fetchone():
            raise LeaseLostError(lease.id)


def _read_body(connection: sqlite3.Connection, owner: str, response: str, since: float) -> Body:
    query = "SELECT body FROM responses WHERE id = ? AND owner = ? AND created >= ?"
    row = connection.execute(query, (response, owner, since)).fetchone()
    if row is None:
        raise _not_found(response)
    body: Body = parse_json(row[0])
    return body


def _not_found(response: str) -> NotFoundError:
    return NotFoundError(f"Response with id '{response}' not found.", param="response_id")


def _update(connection: sqlite3.Connection, response: str, body: Body) -> None:
    query = "UPDATE responses SET status = ?, body = ? WHERE id = ?"
    connection.execute(query, (body["status"], dump_json(body), response))


def _finish(connection: sqlite3.Connection, response: str, body: Body, now: float) -> None:
    """Store the final state of a background response: others can continue from it, and it is not resumed."""
    _update(connection, response, body)
    connection.execute("UPDATE responses SET request = ? WHERE id = ?", (b"{}", response))
    _append_to_conversation(connection, body, _given(connection, response), now)
    place = connection.execute("SELECT count(*) FROM items WHERE response = ?", (response,)).fetchone()[0]
    _add_items(connection, response, place, body["output"], given=False)


def _append_to_conversation(connection: sqlite3.Connection, body: Body, given: Sequence[Item], now: float) -> None:
    """Append the input and output of a completed response to its conversation, if it has one."""
    if body.get("conversation") and body["status"] in _COMPLETED:
        rows.append(connection, body["conversation"]["id"], [*given, *body["output"]], now)


def _emitted(connection: sqlite3.Connection, response: str) -> list[dict[str, Any]]:
    query = "SELECT data FROM events WHERE response = ? ORDER BY number"
    return [parse_json(data) for (data,) in connection.execute(query, (response,))]


def _add_items(
    connection: sqlite3.Connection, response: str, place: int, items: Sequence[Item], *, given: bool
) -> None:
    placed = [(response, place + step, item["id"], given, dump_json(item)) for step, item in enumerate(items)]
    connection.executemany("INSERT INTO items VALUES (?, ?, ?, ?, ?)", placed)


def _items(connection: sqlite3.Connection, response: str) -> list[tuple[Item, bool]]:
    """Return the items of one response, and whether each is input."""
    query = "SELECT data, given FROM items WHERE response = ? ORDER BY place"
    return [(rows.parse_item(data), bool(given)) for data, given in connection.execute(query, (response,))]


def _given(connection: sqlite3.Connection, response: str) -> list[Item]:
    return [item for item, given in _items(connection, response) if given]


def _seen(connection: sqlite3.Connection, response: str, since: float, missing: type[ApiError]) -> list[Item]:
    """Return the items of the conversation that a response has seen, as far as they still exist.

    Raises `missing` if the conversation is gone.
    """
    query = (
        "SELECT conversation, seen, used FROM response_conversations"
        " LEFT JOIN conversations ON conversations.id = conversation WHERE response = ?"
    )
    row = connection.execute(query, (response,)).fetchone()
    if row is None:
        return []
    conversation, seen, used = row
    if used is None or used < since:
        raise _missing_error(
            missing, f"The conversation '{conversation}', which '{response}' was made in, is not there."
        )
    return rows.items_before(connection, conversation, seen)


def _missing_error(missing: type[ApiError], message: str) -> ApiError:
    return missing(message, param="previous_response_id", code="previous_response_not_found")


def _history(
    connection: sqlite3.Connection, owner: str, response: str, since: float, missing: type[ApiError]
) -> list[Item]:
    """Return the items of a response and of all earlier ones. Raises `missing` if one is gone."""
    parts: list[list[Item]] = []
    step: str | None = response
    size = 0
    while step is not None:
        query = (
            "SELECT previous, status, (SELECT sum(length(data)) FROM items WHERE response = responses.id),"
            " (SELECT bytes FROM conversations JOIN response_conversations ON conversations.id = conversation"
            " WHERE response = responses.id) FROM responses WHERE id = ? AND owner = ? AND created >= ?"
        )
        row = connection.execute(query, (step, owner, since)).fetchone()
        if row is None:
            raise _missing_error(missing, f"Previous response with id '{step}' not found.")
        if row[1] in _RUNNING:
            raise BadRequestError(f"The response '{step}' has not ended yet.", param="previous_response_id")
        size += (row[2] or 0) + (row[3] or 0)
        if size > MAX_HISTORY_BYTES:
            raise BadRequestError(
                f"The responses to go on from hold more than {MAX_HISTORY_BYTES} bytes.", param="previous_response_id"
            )
        parts.append([item for item, _ in _items(connection, step)])
        parts.append(_seen(connection, step, since, missing))
        step = row[0]
    return [item for part in reversed(parts) for item in part]
